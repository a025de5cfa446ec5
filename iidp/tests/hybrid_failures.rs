//! What goes wrong on a mesh ends in one clear error on every rank, with nothing changed.

mod blocks;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blocks::{Data, Task, even, gpt, gpt_of, mlp, resnet, samples, vit};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use iidp::hybrid::{BlockModel, HybridWorkload, ScheduleKind};
use iidp::models::{BlockGptConfig, BlockMlp, BlockMlpConfig};
use iidp::pipeline::{Activation, StageContext, StageModule};
use iidp::{
    BoxError, Error, HybridConfig, HybridExecutor, MicroBatch, ParallelDims, ShardSpec,
    WorkerLayout,
};

fn refused<M: BlockModel + Clone>(task: &Task<M>, config: HybridConfig) -> String {
    config
        .init(task.clone())
        .expect_err("the layout does not fit")
        .to_string()
}

#[test]
fn layouts_that_do_not_divide_name_the_dimension_and_the_nearest() {
    let of = |dp, tp, pp| even(ParallelDims::new(dp, tp, pp), 1, dp);
    assert_eq!(
        refused(&gpt(false), of(1, 5, 1)),
        "heads of 12 cannot be cut into tp = 5 equal parts: tp = 4 or a size of 15 would do"
    );
    let grouped = gpt_of(BlockGptConfig::new(24, 12, 2, 24, 12).with_kv_heads(4));
    assert_eq!(
        refused(&grouped, of(1, 3, 1)),
        "key-value heads of 4 cannot be cut into tp = 3 equal parts: tp = 2 or a size of 6 would do"
    );
    let vocabulary = gpt_of(BlockGptConfig::new(26, 12, 2, 24, 12));
    assert_eq!(
        refused(&vocabulary, of(1, 3, 1)),
        "vocabulary of 26 cannot be cut into tp = 3 equal parts: tp = 2 or a size of 27 would do"
    );
    let hidden = gpt_of(BlockGptConfig::new(24, 12, 2, 24, 12).with_hidden(28));
    assert_eq!(
        refused(&hidden, of(1, 3, 1)),
        "hidden width of 28 cannot be cut into tp = 3 equal parts: tp = 2 or a size of 30 would do"
    );
    assert_eq!(
        refused(&gpt(false), of(1, 1, 5)),
        "number of blocks of 4 cannot be cut into pp x chunks = 5 equal parts: pp x chunks = 4 or a size of 5 would do"
    );
    assert!(
        refused(&gpt_of(BlockGptConfig::new(24, 12, 2, 24, 5)), of(1, 1, 1))
            .contains("width of 24")
    );
    assert!(refused(&resnet(), of(1, 4, 1)).contains("groups of channels of 2"));
    assert!(refused(&vit(), of(1, 3, 1)).contains("heads of 4"));
    assert!(refused(&mlp(), of(1, 5, 1)).contains("hidden width of 24"));
    // 12 tokens on 5 ranks, where the heads would allow it.
    let five = gpt_of(BlockGptConfig::new(25, 12, 1, 20, 10));
    let mut executor = of(1, 5, 1).with_sequence_parallel(true).init(five).unwrap();
    assert_eq!(
        executor.step(&[1], 1e-3).unwrap_err().to_string(),
        "sequence length of 12 cannot be cut into tp = 5 equal parts: tp = 4 or a size of 15 would do"
    );
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let dims = ParallelDims::new(2, 1, 2);
    let layout = WorkerLayout::new(1, 1, 1);
    assert!(matches!(
        HybridConfig::new(dims, vec![layout]).init(mlp()),
        Err(Error::LengthMismatch {
            got: 1,
            expected: 2,
            ..
        })
    ));
    assert!(matches!(
        HybridConfig::new(ParallelDims::new(1, 0, 1), vec![layout]).init(mlp()),
        Err(Error::InvalidTopology { .. })
    ));
    let of = || even(dims, 1, 2);
    assert!(refused(&mlp(), of().with_cuts(vec![6])).contains("stage cuts"));
    assert!(refused(&mlp(), of().with_cuts(vec![1, 2])).contains("stage cuts"));
    let flat = even(ParallelDims::new(1, 1, 1), 1, 1);
    assert!(
        refused(
            &mlp(),
            flat.with_schedule(ScheduleKind::Interleaved { chunks: 2 })
        )
        .contains("interleaved")
    );
    assert!(
        refused(
            &mlp(),
            of().with_schedule(ScheduleKind::Interleaved { chunks: 0 })
        )
        .contains("schedule")
    );
    assert!(refused(&mlp(), of().with_clip_norm(-1.0)).contains("clip norm"));
    let worlds = iidp::LocalCommunicator::group(3, Duration::from_secs(1)).unwrap();
    let worlds = worlds
        .into_iter()
        .map(|end| Box::new(end) as Box<dyn iidp::Communicator>)
        .collect();
    assert!(matches!(
        of().init_with(mlp(), worlds),
        Err(Error::InvalidTopology { world_size: 3, .. })
    ));
    let mut executor = of().init(mlp()).unwrap();
    assert!(matches!(
        executor.step(&[1, 2, 3], 1e-3),
        Err(Error::BatchMismatch {
            samples: 3,
            expected: 2,
            ..
        })
    ));
    assert!(matches!(executor.step(&[], 1e-3), Err(Error::EmptyBatch)));
    assert!(matches!(
        executor.step(&[1, 2], f64::NAN),
        Err(Error::Invalid { .. })
    ));
}

/// What happens when a certain block meets a certain sample.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Accident {
    Panic,
    Refusal,
    Nan,
    Hang,
}

static ACCIDENTS: [AtomicU64; 4] = [const { AtomicU64::new(u64::MAX) }; 4];

/// A block that has an accident in front of it.
#[derive(Module, Debug)]
struct Fragile {
    block: BlockMlp,
    accident: usize,
}

impl StageModule for Fragile {
    fn forward(&self, x: Activation, context: &StageContext<'_>) -> Result<Activation, BoxError> {
        let kinds = [
            Accident::Panic,
            Accident::Refusal,
            Accident::Nan,
            Accident::Hang,
        ];
        let y = self.block.forward(x, context)?;
        let Some(kind) = kinds.get(self.accident) else {
            return Ok(y);
        };
        if !context
            .batch
            .samples
            .contains(&ACCIDENTS[self.accident].load(Ordering::SeqCst))
        {
            return Ok(y);
        }
        match kind {
            Accident::Panic => panic!("a wheel came off"),
            Accident::Refusal => Err("no such sample".into()),
            Accident::Nan => Ok(Activation::new(y.into_tensor::<2>()?.mul_scalar(f32::NAN))),
            Accident::Hang => {
                std::thread::sleep(Duration::from_millis(1500));
                Ok(y)
            }
        }
    }

    fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        iidp::tensor_parallel::nested("block", self.block.shard_specs())
    }
}

/// A perceptron whose block 2 is fragile.
#[derive(Debug, Clone)]
struct FragileMlp {
    model: BlockMlpConfig,
    accident: Accident,
}

impl BlockModel for FragileMlp {
    type Block = Fragile;

    fn blocks(&self) -> usize {
        self.model.blocks()
    }

    fn init_block(&self, index: usize, device: &Device) -> Result<Fragile, BoxError> {
        Ok(Fragile {
            block: self.model.init_block(index, device)?,
            accident: if index == 2 {
                self.accident as usize
            } else {
                usize::MAX
            },
        })
    }
}

fn fragile(
    accident: Accident,
    dims: ParallelDims,
    timeout: Duration,
) -> HybridExecutor<Task<FragileMlp>> {
    let task = Task {
        model: FragileMlp {
            model: BlockMlpConfig::new(6, 12, 4, 3),
            accident,
        },
        data: Data::Numbers {
            shape: vec![6],
            classes: 3,
        },
    };
    even(dims, 1, 4 * dims.dp)
        .with_timeout(timeout)
        .init(task)
        .unwrap()
}

/// A good step, an accident in the middle of the schedule, and a step that must equal the one of a run without the accident.
fn survives(
    accident: Accident,
    dims: ParallelDims,
    timeout: Duration,
    expected: impl Fn(&Error) -> bool,
) {
    let mut calm = fragile(accident, dims, timeout);
    let mut executor = fragile(accident, dims, timeout);
    let size = executor.global_batch();
    for step in 0..2 {
        let batch = samples(step, size);
        assert_eq!(
            calm.step(&batch, 1e-2).unwrap().loss,
            executor.step(&batch, 1e-2).unwrap().loss
        );
    }
    let state = executor.state().unwrap();
    let batch = samples(2, size);
    ACCIDENTS[accident as usize].store(batch[2], Ordering::SeqCst);
    let started = Instant::now();
    let error = executor.step(&batch, 1e-2).expect_err("the step fails");
    ACCIDENTS[accident as usize].store(u64::MAX, Ordering::SeqCst);
    assert!(expected(&error), "{error:?}");
    assert!(started.elapsed() < 10 * timeout, "the ranks hang");
    if accident == Accident::Hang {
        return;
    }
    assert_eq!(executor.state().unwrap(), state, "nothing has changed");
    let (a, b) = (
        calm.step(&batch, 1e-2).unwrap(),
        executor.step(&batch, 1e-2).unwrap(),
    );
    assert_eq!((a.loss, a.gradient_norm), (b.loss, b.gradient_norm));
}

#[test]
fn a_panic_in_a_stage_ends_every_rank_with_one_error() {
    for dims in [ParallelDims::new(1, 1, 4), ParallelDims::new(2, 2, 2)] {
        survives(
            Accident::Panic,
            dims,
            Duration::from_secs(30),
            |error| matches!(error, Error::WorkerPanicked { micro_batch: 2, message, .. } if message == "a wheel came off"),
        );
    }
}

#[test]
fn an_error_of_a_block_names_rank_and_micro_batch() {
    survives(
        Accident::Refusal,
        ParallelDims::new(1, 1, 3),
        Duration::from_secs(30),
        |error| matches!(error, Error::Workload { rank: 1, micro_batch: 2, message } if message == "no such sample"),
    );
}

#[test]
fn a_loss_that_is_not_finite_rolls_the_step_back() {
    survives(
        Accident::Nan,
        ParallelDims::new(1, 2, 2),
        Duration::from_secs(30),
        |error| matches!(error, Error::NonFiniteLoss { micro_batch: 2, .. }),
    );
}

#[test]
fn a_stage_that_hangs_is_given_up_after_the_time_out() {
    survives(
        Accident::Hang,
        ParallelDims::new(1, 1, 3),
        Duration::from_millis(300),
        |error| matches!(error, Error::Timeout { .. } | Error::RankTimeout { .. }),
    );
}

/// A model whose tie names nothing.
#[derive(Debug, Clone)]
struct Knotted(BlockMlpConfig);

impl BlockModel for Knotted {
    type Block = BlockMlp;

    fn blocks(&self) -> usize {
        self.0.blocks()
    }

    fn init_block(&self, index: usize, device: &Device) -> Result<BlockMlp, BoxError> {
        self.0.init_block(index, device)
    }

    fn ties(&self) -> Vec<iidp::hybrid::Tie> {
        vec![iidp::hybrid::Tie::new(0, "nothing", 2, "down.weight")]
    }
}

#[test]
fn a_tie_to_nothing_is_refused_on_every_rank() {
    let task = Task {
        model: Knotted(BlockMlpConfig::new(6, 12, 4, 3)),
        data: mlp().data,
    };
    let error = even(ParallelDims::new(1, 1, 2), 1, 1)
        .init(task)
        .unwrap_err();
    assert!(error.to_string().contains("nothing"), "{error}");
}

/// An executor whose workload lies about its input.
struct Empty(Arc<Task<BlockMlpConfig>>);

impl HybridWorkload for Empty {
    type Model = BlockMlpConfig;

    fn model(&self) -> &BlockMlpConfig {
        &self.0.model
    }

    fn input(&self, batch: &MicroBatch<'_>, device: &Device) -> Result<Activation, BoxError> {
        self.0.input(batch, device)
    }

    fn loss(&self, output: Activation, _: &StageContext<'_>) -> Result<Tensor<1>, BoxError> {
        Ok(output.into_tensor::<2>()?.flatten(0, 1))
    }
}

#[test]
fn a_loss_of_many_elements_is_refused() {
    let mut executor = even(ParallelDims::new(1, 1, 2), 1, 1)
        .init(Empty(Arc::new(mlp())))
        .unwrap();
    assert!(matches!(
        executor.step(&[1], 1e-3),
        Err(Error::LossNotScalar { elements: 3, .. })
    ));
}
