//! A group of tensor-parallel ranks computes what one rank does: loss, every gradient, and 50 steps of training.

mod blocks;

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use blocks::{
    Run, SEED, Task, difference_of_losses, difference_of_parameters, even, gpt, mlp, modern_gpt,
    resnet, vit,
};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Distribution, Gradients, Int, Tensor, TensorData};
use iidp::hybrid::{BlockModel, HybridWorkload, init_whole, shard_module};
use iidp::pipeline::{Sequential, StageContext, StageModule};
use iidp::tensor_parallel::{TensorParallel, parallel_cross_entropy};
use iidp::{LocalCommunicator, MicroBatch, Mode, ParallelDims, ShardSpec};

type Named = BTreeMap<String, Vec<f32>>;

/// Gradients by path.
struct Collect<'a> {
    path: Vec<String>,
    gradients: &'a mut Gradients,
    found: Named,
}

impl ModuleVisitor for Collect<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param
            .val()
            .grad_remove(self.gradients)
            .expect("every parameter is used");
        let values = gradient.into_data().try_to_vec::<f32>().unwrap();
        self.found
            .insert(blocks::plain_name(&self.path.join(".")), values);
    }
}

fn loss_and_gradients<M: BlockModel>(
    task: &Task<M>,
    model: &Sequential<M::Block>,
    group: &TensorParallel,
) -> (f32, Named) {
    let device = Device::flex().autodiff();
    let batch = MicroBatch::new(&[3, 141, 59, 26], Mode::Train);
    let context = StageContext { batch, group };
    let output = model
        .forward(task.input(&batch, &device).unwrap(), &context)
        .unwrap();
    let loss = task.loss(output, &context).unwrap();
    let value = loss.clone().into_scalar::<f32>();
    let mut gradients = loss.backward();
    group.check().unwrap();
    let mut collect = Collect {
        path: Vec::new(),
        gradients: &mut gradients,
        found: BTreeMap::new(),
    };
    model.visit(&mut collect);
    (value, collect.found)
}

fn shapes<B: StageModule>(model: &Sequential<B>) -> BTreeMap<String, Vec<usize>> {
    struct Shapes(Vec<String>, BTreeMap<String, Vec<usize>>);
    impl ModuleVisitor for Shapes {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1
                .insert(blocks::plain_name(&self.0.join(".")), param.dims().to_vec());
        }
    }
    let mut shapes = Shapes(Vec::new(), BTreeMap::new());
    model.visit(&mut shapes);
    shapes.1
}

/// Loss and every gradient of `tp` ranks against those of one.
fn compare_gradients<M: BlockModel + Clone>(task: &Task<M>, tp: usize, sequence: bool) {
    let device = Device::flex().autodiff();
    let whole = init_whole(&task.model, &device, SEED).unwrap();
    let (loss, expected) = loss_and_gradients(task, &whole, &TensorParallel::alone());
    let specs: BTreeMap<String, ShardSpec> = whole.shard_specs().into_iter().collect();
    let shapes = shapes(&whole);
    let group = LocalCommunicator::group(tp, Duration::from_secs(30)).unwrap();
    let ranks: Vec<(f32, Named)> = thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .enumerate()
            .map(|(rank, end)| {
                let plain = whole.valid();
                scope.spawn(move || {
                    let shard = shard_module(plain, tp, rank).unwrap().train();
                    let group = TensorParallel::new(Box::new(end)).with_sequence_parallel(sequence);
                    loss_and_gradients(task, &shard, &group)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (rank, (got, gradients)) in ranks.iter().enumerate() {
        assert!(
            (got - loss).abs() <= 1e-5 * loss.abs(),
            "loss {got}, expected {loss}"
        );
        assert_eq!(gradients.len(), expected.len());
        for (name, whole) in &expected {
            let spec = specs.get(name).cloned().unwrap_or_default();
            let part = spec.cut(whole, &shapes[name], tp, rank).unwrap();
            let size = whole.iter().fold(0.0_f32, |size, x| size.max(x.abs()));
            let worst = (part.iter().zip(&gradients[name]))
                .map(|(a, b)| (a - b).abs())
                .fold(0.0_f32, f32::max);
            assert!(
                worst <= 1e-5 * size.max(1e-4),
                "{name} on rank {rank} of {tp}: off by {worst} of {size}"
            );
            if spec == ShardSpec::Replicated {
                assert_eq!(
                    gradients[name], ranks[0].1[name],
                    "{name} differs among ranks"
                );
            }
        }
    }
}

#[test]
fn gpt_gradients_equal_those_of_one_rank() {
    for tp in 2..=4 {
        compare_gradients(&gpt(false), tp, false);
        compare_gradients(&gpt(false), tp, true);
    }
    for tp in 2..=3 {
        compare_gradients(&modern_gpt(false), tp, tp == 2);
    }
}

#[test]
fn other_models_gradients_equal_those_of_one_rank() {
    compare_gradients(&mlp(), 3, false);
    compare_gradients(&resnet(), 2, false);
    compare_gradients(&vit(), 2, false);
    compare_gradients(&vit(), 4, true);
}

/// 50 steps; replicated parameters must stay equal to the bit on all ranks.
fn compare_training<M: BlockModel + Clone>(task: &Task<M>, tp: usize, sequence: bool) {
    let run = Run::new(50, 2e-3);
    let expected = run.one_device(task, 2, 1);
    let dims = ParallelDims::new(1, tp, 1);
    let (got, mut executor) = run.hybrid(task, even(dims, 2, 1).with_sequence_parallel(sequence));
    let losses = difference_of_losses(&got, &expected);
    let parameters = difference_of_parameters(&got, &expected);
    assert!(
        losses < 1e-5,
        "tp = {tp}: losses off by {losses:e}, parameters by {parameters:e}"
    );
    // Adam divides a gradient by its size: where it is little more than rounding (biases of keys), so is the update.
    assert!(
        parameters < 1e-3,
        "tp = {tp}: parameters off by {parameters:e}"
    );
    assert!(
        expected.losses[49] < 0.9 * expected.losses[0],
        "{:?}",
        expected.losses
    );
    let ranks = executor.local_tensors().unwrap();
    for local in &ranks[1..] {
        for (mine, first) in local.iter().zip(&ranks[0]) {
            assert_eq!(mine.name, first.name);
            if mine.spec == ShardSpec::Replicated {
                assert_eq!(
                    mine.values, first.values,
                    "{} differs among ranks",
                    mine.name
                );
                assert_eq!(mine.moments, first.moments);
            }
        }
    }
}

#[test]
fn training_equals_that_of_one_rank() {
    compare_training(&gpt(false), 2, true);
    compare_training(&gpt(true), 3, false);
    compare_training(&gpt(false), 4, false);
    compare_training(&modern_gpt(true), 3, false);
}

/// Values and gradient against the textbook formula on the whole logits; and nothing of the logits' size travels.
#[test]
fn cross_entropy_does_not_gather_logits() {
    let (rows, classes, tp) = (5, 12, 3);
    let device = Device::flex();
    let logits = Tensor::<2>::random([rows, classes], Distribution::Normal(0.0, 30.0), &device);
    let targets: Vec<i32> = vec![0, 11, 4, 7, 3];
    let values = logits.clone().into_data().try_to_vec::<f32>().unwrap();
    let mut expected_loss = 0.0;
    let mut expected = vec![0.0; rows * classes];
    for row in 0..rows {
        let z: Vec<f64> = values[row * classes..(row + 1) * classes]
            .iter()
            .map(|z| f64::from(*z))
            .collect();
        let max = z.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = z.iter().map(|z| (z - max).exp()).sum();
        let target = targets[row] as usize;
        expected_loss += (sum.ln() + max - z[target]) / rows as f64;
        for class in 0..classes {
            let hit = f64::from(u8::from(class == target));
            expected[row * classes + class] = ((z[class] - max).exp() / sum - hit) / rows as f64;
        }
    }
    let group = LocalCommunicator::group(tp, Duration::from_secs(30)).unwrap();
    thread::scope(|scope| {
        for (rank, end) in group.into_iter().enumerate() {
            let (values, targets, expected) = (&values, &targets, &expected);
            scope.spawn(move || {
                let device = Device::flex().autodiff();
                let part = ShardSpec::split(1)
                    .cut(values, &[rows, classes], tp, rank)
                    .unwrap();
                let part =
                    Tensor::<2>::from_data(TensorData::new(part, [rows, classes / tp]), &device)
                        .require_grad();
                let targets =
                    Tensor::<1, Int>::from_data(TensorData::new(targets.clone(), [rows]), &device);
                let group = TensorParallel::new(Box::new(end));
                let loss = parallel_cross_entropy(part.clone(), targets, &group);
                let got = f64::from(loss.clone().into_scalar::<f32>());
                assert!(
                    (got - expected_loss).abs() < 1e-5 * expected_loss,
                    "{got}, expected {expected_loss}"
                );
                let gradient = part.grad_remove(&mut loss.backward()).unwrap();
                group.check().unwrap();
                let gradient = gradient.into_data().try_to_vec::<f32>().unwrap();
                for row in 0..rows {
                    for column in 0..classes / tp {
                        let want = expected[row * classes + rank * classes / tp + column];
                        let got = f64::from(gradient[row * classes / tp + column]);
                        assert!((got - want).abs() < 1e-6, "{got}, expected {want}");
                    }
                }
            });
        }
    });
}

/// A rank that leaves makes the others' gradient useless, and they learn it.
#[test]
fn a_lost_rank_is_reported_after_the_backward_pass() {
    let mut group = LocalCommunicator::group(2, Duration::from_secs(30)).unwrap();
    let other = group.pop();
    let group = TensorParallel::new(Box::new(group.remove(0)));
    drop(other);
    let device = Device::flex().autodiff();
    let x = Tensor::<1>::from_floats([1.0, 2.0], &device).require_grad();
    let gradient = x.grad_remove(&mut group.copy(x.clone()).sum().backward());
    assert_eq!(gradient.unwrap().dims(), [2]);
    assert!(matches!(
        group.check(),
        Err(iidp::Error::RankLost { rank: 1, .. })
    ));
    // It goes on without waiting.
    assert_eq!(
        group
            .gather_tokens(Tensor::<3>::ones([1, 2, 1], &device))
            .dims(),
        [1, 4, 1]
    );
    assert_eq!(
        group
            .scatter_tokens(Tensor::<3>::ones([1, 2, 1], &device))
            .dims(),
        [1, 1, 1]
    );
}
