//! Gradients of weights that are computed later than those of inputs.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps as _;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::module::{Param, ParamId};
use burn::tensor::Tensor;

/// Collects, in a backward pass, what the gradients of the weights of linear layers will be computed from.
///
/// A [`TensorParallel`](super::TensorParallel) handle that carries one makes the linear layers of this module skip the gradient of their weight in the
/// backward pass; [`compute`](Self::compute) makes up for it. This is what splits a stage's backward pass for a zero-bubble schedule: Burn's own
/// operations compute the gradients of both factors of a product in one go, and its backward pass can run only once.
#[derive(Debug, Clone, Default)]
pub struct DeferredGradients {
    due: Arc<Mutex<Vec<Due>>>,
}

#[derive(Debug)]
struct Due {
    weight: ParamId,
    /// `[rows, inputs]`.
    input: FlexTensor,
    /// `[rows, outputs]`.
    gradient: FlexTensor,
}

impl DeferredGradients {
    /// The gradients of the weights used since the last call, each the sum over its uses, in the order of the backward pass.
    pub fn compute(&self) -> Vec<(ParamId, Tensor<2>)> {
        let due = std::mem::take(&mut *self.due.lock().unwrap_or_else(PoisonError::into_inner));
        let mut gradients: Vec<(ParamId, Tensor<2>)> = Vec::with_capacity(due.len());
        for Due {
            weight,
            input,
            gradient,
        } in due
        {
            let input = Tensor::<2>::from_primitive::<Flex>(input);
            let gradient = Tensor::<2>::from_primitive::<Flex>(gradient);
            let product = input.transpose().matmul(gradient);
            match gradients.iter_mut().find(|(id, _)| *id == weight) {
                Some((_, sum)) => *sum = sum.clone() + product,
                None => gradients.push((weight, product)),
            }
        }
        gradients
    }
}

/// A weight and where its gradient is to be noted.
#[derive(Debug, Clone)]
pub(super) struct Sink {
    weight: ParamId,
    gradients: DeferredGradients,
}

#[backend_extension(Flex, Autodiff)]
pub(super) trait DeferredOps: Backend {
    fn linear_deferred(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        sink: Sink,
    ) -> FloatTensor<Self>;
}

/// What the backward pass needs of the backend underneath.
pub(super) trait DeferredKernels: Backend {
    fn note(input: FloatTensor<Self>, gradient: FloatTensor<Self>, sink: Sink);
}

impl DeferredOps for Flex {
    fn linear_deferred(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        _: Sink,
    ) -> FloatTensor<Self> {
        Self::float_matmul(x, weight)
    }
}

impl DeferredKernels for Flex {
    fn note(input: FloatTensor<Self>, gradient: FloatTensor<Self>, sink: Sink) {
        let due = Due {
            weight: sink.weight,
            input,
            gradient,
        };
        let mut list = sink
            .gradients
            .due
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        list.push(due);
    }
}

impl<B: DeferredOps + DeferredKernels, C: CheckpointStrategy> DeferredOps for Autodiff<B, C> {
    fn linear_deferred(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        sink: Sink,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct InputOnly;

        impl<B: DeferredKernels> Backward<B, 2> for InputOnly {
            type State = (FloatTensor<B>, FloatTensor<B>, Sink);

            fn backward(
                self,
                ops: Ops<Self::State, 2>,
                gradients: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                let [for_x, for_weight] = ops.parents;
                let gradient = gradients.consume::<B>(&ops.node);
                let (x, weight, sink) = ops.state;
                if let Some(parent) = for_x {
                    let product = B::float_matmul(gradient.clone(), B::float_transpose(weight));
                    gradients.register::<B>(parent.id, product);
                }
                if for_weight.is_some() {
                    B::note(x, gradient, sink);
                }
            }
        }

        let (x, x_node) = x.into_parts();
        let (weight, weight_node) = weight.into_parts();
        let output = B::linear_deferred(x.clone(), weight.clone(), sink.clone());
        match InputOnly
            .prepare::<C>([x_node, weight_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prepared) => prepared.finish((x, weight, sink), output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }
}

/// `x W` whose gradient for `W` is left to `gradients`.
pub(super) fn linear_deferred<const D: usize>(
    x: Tensor<D>,
    weight: &Param<Tensor<2>>,
    gradients: &DeferredGradients,
) -> Tensor<D> {
    let mut shape = x.dims();
    let inputs = shape[D - 1];
    let rows = shape[..D - 1].iter().product::<usize>();
    let value = weight.val();
    shape[D - 1] = value.dims()[1];
    let sink = Sink {
        weight: weight.id,
        gradients: gradients.clone(),
    };
    let x: Tensor<2> = x.reshape([rows, inputs]);
    let product: Tensor<2> = Tensor::from_dispatch(Dispatch::linear_deferred(
        x.into_dispatch(),
        value.into_dispatch(),
        sink,
    ));
    product.reshape(shape)
}
