//! A virtual worker's part of a step: the forward and backward passes of one rank's chunks.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::workload::{BlockModel, HybridWorkload};
use crate::bucket::FlatGradient;
use crate::executor::Mode;
use crate::pipeline::{
    Activation, Message, Pass, Sequential, StageContext, StageModule, StageTasks, Task, flat,
};
use crate::tensor_parallel::{DeferredGradients, TensorParallel};
use crate::{BoxError, Error, MicroBatch, ParameterLayout};

pub(super) type BlockOf<W> = <<W as HybridWorkload>::Model as BlockModel>::Block;

/// What a worker computed of one micro-batch.
#[derive(Debug)]
pub(super) enum Finding {
    /// The loss, on the last position of the pipeline.
    Loss { micro_batch: usize, loss: f32 },
    /// Gradients of the parameters of one chunk.
    Gradient {
        /// Position in the global batch.
        micro_batch: usize,
        /// How many gradients the worker has sent before.
        sequence: usize,
        worker: usize,
        chunk: usize,
        gradient: FlatGradient,
        /// Buffers after the forward pass; empty if there are none.
        buffers: Vec<f32>,
    },
}

/// What all workers of a rank share in a step.
pub(super) struct StepContext<'a, W: HybridWorkload> {
    pub(super) workload: &'a W,
    pub(super) layout: &'a ParameterLayout,
    /// Plain device.
    pub(super) device: &'a Device,
    pub(super) rank: usize,
    pub(super) stage: usize,
    pub(super) stages: usize,
    pub(super) recompute: bool,
    pub(super) deferred: bool,
    pub(super) seed: u64,
    pub(super) step: u64,
    pub(super) mode: Mode,
    /// The global batch.
    pub(super) samples: &'a [u64],
    pub(super) local_batch: usize,
}

impl<W: HybridWorkload> StepContext<'_, W> {
    fn batch(&self, micro_batch: usize) -> MicroBatch<'_> {
        let start = micro_batch * self.local_batch;
        let end = (start + self.local_batch).min(self.samples.len());
        let mut batch = MicroBatch::new(&self.samples[start..end], self.mode);
        batch.index = micro_batch;
        batch.step = self.step;
        batch.seed = self.seed;
        batch
    }
}

/// A micro-batch between its forward and its backward pass.
enum InFlight<B: StageModule> {
    /// The graph.
    Graph(Box<Graph<B>>),
    /// The input, to compute the graph from.
    Input(Option<Message>),
}

struct Graph<B: StageModule> {
    replica: Sequential<B>,
    /// The leaf; `None` on the first position.
    input: Option<Tensor<1>>,
    input_shape: Vec<usize>,
    /// The activation, or the loss on the last position.
    output: Tensor<1>,
    deferred: Option<DeferredGradients>,
}

/// One worker of a rank in one step.
pub(super) struct StageWork<'a, W: HybridWorkload> {
    pub(super) context: &'a StepContext<'a, W>,
    /// Untracked blocks of the rank with the current weights, which share the rank's storage.
    pub(super) template: Sequential<Sequential<BlockOf<W>>>,
    pub(super) group: &'a TensorParallel,
    /// Positions in the global batch of the worker's micro-batches.
    pub(super) micro_batches: Vec<usize>,
    pub(super) findings: Sender<Finding>,
    in_flight: BTreeMap<(usize, usize), InFlight<BlockOf<W>>>,
    /// Weight gradients to be computed, with the buffers that belong to the micro-batch.
    weights_due: BTreeMap<(usize, usize), DeferredGradients>,
    sent: usize,
    worker: usize,
    /// The task in progress, to be named if it panics.
    pub(super) current: usize,
}

impl<'a, W: HybridWorkload> StageWork<'a, W> {
    pub(super) fn new(
        context: &'a StepContext<'a, W>,
        template: Sequential<Sequential<BlockOf<W>>>,
        group: &'a TensorParallel,
        worker: usize,
        micro_batches: Vec<usize>,
        findings: Sender<Finding>,
    ) -> Self {
        Self {
            context,
            template,
            group,
            micro_batches,
            findings,
            in_flight: BTreeMap::new(),
            weights_due: BTreeMap::new(),
            sent: 0,
            worker,
            current: 0,
        }
    }

    fn is_last(&self, chunk: usize) -> bool {
        let chunks = self.template.blocks().len();
        chunk + 1 == chunks && self.context.stage + 1 == self.context.stages
    }

    fn workload_error(&self, micro_batch: usize) -> impl Fn(BoxError) -> Error + use<W> {
        let rank = self.context.rank;
        move |error| match error.downcast::<Error>() {
            // The crate's own errors keep their type.
            Ok(error) => *error,
            Err(error) => Error::Workload {
                rank,
                micro_batch,
                message: error.to_string(),
            },
        }
    }

    /// Runs a chunk: the output, or the loss on the last position.
    fn pass(
        &self,
        chunk: &Sequential<BlockOf<W>>,
        number: usize,
        micro_batch: usize,
        input: Activation,
        group: &TensorParallel,
    ) -> Result<Activation, Error> {
        let failed = self.workload_error(micro_batch);
        let context = StageContext {
            batch: self.context.batch(micro_batch),
            group,
        };
        let mut output = chunk.forward(input, &context).map_err(&failed)?;
        if self.is_last(number) {
            let loss = (self.context.workload)
                .loss(output, &context)
                .map_err(&failed)?;
            output = Activation::new(loss);
            if output.shape() != [1] {
                return Err(Error::LossNotScalar {
                    micro_batch,
                    elements: output.shape().iter().product(),
                });
            }
        }
        group.check()?;
        Ok(output)
    }

    fn first_input(&self, micro_batch: usize, device: &Device) -> Result<Activation, Error> {
        (self.context.workload)
            .input(&self.context.batch(micro_batch), device)
            .map_err(self.workload_error(micro_batch))
    }

    /// A forward pass with a graph.
    fn graph(
        &self,
        number: usize,
        micro_batch: usize,
        input: Option<Message>,
    ) -> Result<(Graph<BlockOf<W>>, Vec<usize>), Error> {
        let device = self.context.device.clone().autodiff();
        // Leaves of its own over the rank's storage: graphs of different threads must share none.
        let replica = self.template.blocks()[number].clone().train();
        let (x, leaf) = match input {
            None => (self.first_input(micro_batch, &device)?, None),
            Some(message) => {
                let x = Activation::receive(message, &device);
                let leaf = x.flat().clone();
                (x, Some(leaf))
            }
        };
        let input_shape = x.shape().to_vec();
        let deferred = self.context.deferred.then(DeferredGradients::default);
        let deferring = deferred.as_ref().map(|sink| self.group.deferring(sink));
        let group = deferring.as_ref().unwrap_or(self.group);
        let output = self.pass(&replica, number, micro_batch, x, group)?;
        let shape = output.shape().to_vec();
        Ok((
            Graph {
                replica,
                input: leaf,
                input_shape,
                output: output.into_flat(),
                deferred,
            },
            shape,
        ))
    }

    fn report(&mut self, finding: Finding) {
        // The rank outlives its workers' step; if it gave up, nobody wants the finding.
        let _ = self.findings.send(finding);
    }

    fn send_gradient(
        &mut self,
        micro_batch: usize,
        chunk: usize,
        gradient: FlatGradient,
        buffers: Vec<f32>,
    ) {
        let sequence = self.sent;
        self.sent += 1;
        self.report(Finding::Gradient {
            micro_batch,
            sequence,
            worker: self.worker,
            chunk,
            gradient,
            buffers,
        });
    }
}

impl<W: HybridWorkload> StageTasks for StageWork<'_, W> {
    fn forward(
        &mut self,
        chunk: usize,
        micro_batch: usize,
        input: Option<Message>,
    ) -> Result<Option<Message>, Error> {
        let place = (chunk, micro_batch);
        let micro_batch = self.micro_batches[micro_batch];
        self.current = micro_batch;
        let training = self.context.mode == Mode::Train;
        // Running statistics move in a tracked forward pass only.
        let tracked = training && (!self.context.recompute || self.context.layout.buffer_len() > 0);
        let (output, shape) = if tracked {
            let (graph, shape) = self.graph(chunk, micro_batch, input.clone())?;
            let output = graph.output.clone();
            let kept = if self.context.recompute {
                InFlight::Input(input)
            } else {
                InFlight::Graph(Box::new(graph))
            };
            self.in_flight.insert(place, kept);
            (output, shape)
        } else {
            let x = match input.clone() {
                None => self.first_input(micro_batch, self.context.device)?,
                Some(message) => Activation::receive(message, self.context.device),
            };
            let blocks = &self.template.blocks()[chunk];
            let output = self.pass(blocks, chunk, micro_batch, x, self.group)?;
            if training {
                self.in_flight.insert(place, InFlight::Input(input));
            }
            let shape = output.shape().to_vec();
            (output.into_flat(), shape)
        };
        let values = crate::pipeline::host_values(output);
        if self.is_last(chunk) {
            let loss = values[0];
            self.report(Finding::Loss { micro_batch, loss });
            return Ok(None);
        }
        Ok(Some(Message { values, shape }))
    }

    fn backward(
        &mut self,
        task: Task,
        gradient: Option<Message>,
    ) -> Result<Option<Message>, Error> {
        let place = (task.chunk, task.micro_batch);
        let micro_batch = self.micro_batches[task.micro_batch];
        self.current = micro_batch;
        let graph = match self.in_flight.remove(&place) {
            Some(InFlight::Graph(graph)) => *graph,
            Some(InFlight::Input(input)) => self.graph(task.chunk, micro_batch, input)?.0,
            None => {
                return Err(Error::Invalid {
                    what: "schedule",
                    problem: format!("{task} without its forward pass"),
                });
            }
        };
        let Graph {
            replica,
            input,
            input_shape,
            output,
            deferred,
        } = graph;
        if !output.is_tracked() {
            return Err(Error::LossNotTracked { micro_batch });
        }
        let mut gradients = match gradient {
            None => output.backward(),
            Some(message) => {
                let incoming = flat(message.values, self.context.device);
                (output * Tensor::from_inner(incoming)).sum().backward()
            }
        };
        self.group.check()?;
        let answer = input.map(|leaf| {
            let gradient = leaf.grad_remove(&mut gradients);
            let gradient = gradient.map_or_else(
                || vec![0.0; input_shape.iter().product()],
                crate::pipeline::host_values,
            );
            Message {
                values: gradient,
                shape: input_shape,
            }
        });
        let layout = self.context.layout;
        let mut own = FlatGradient::empty(layout);
        layout.take_gradients(&replica, &mut gradients, &mut own, |_| {});
        drop(gradients);
        if let Some(deferred) = deferred {
            if task.pass == Pass::BackwardInput {
                self.weights_due.insert(place, deferred);
            } else {
                layout.add_gradients(&mut own, deferred.compute());
            }
        }
        let buffers = if layout.buffer_len() == 0 {
            Vec::new()
        } else {
            // `valid` first folds what this thread's forward pass left in the running statistics.
            layout.read_buffers(&replica.valid())
        };
        self.send_gradient(micro_batch, task.chunk, own, buffers);
        Ok(answer)
    }

    fn backward_weight(&mut self, chunk: usize, micro_batch: usize) -> Result<(), Error> {
        let due = self.weights_due.remove(&(chunk, micro_batch));
        let micro_batch = self.micro_batches[micro_batch];
        self.current = micro_batch;
        let layout = self.context.layout;
        let mut gradient = FlatGradient::empty(layout);
        layout.add_gradients(
            &mut gradient,
            due.map(|due| due.compute()).unwrap_or_default(),
        );
        self.send_gradient(micro_batch, chunk, gradient, Vec::new());
        Ok(())
    }
}
