//! Tied, frozen and unused parameters, clipping; weights that replicas share.

mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use burn::backend::Flex;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData, activation};
use common::{batch, feature, max_difference, run, seeded};
use iidp::optimizer::SgdConfig;
use iidp::{BoxError, ExecutorConfig, MicroBatch, WorkerLayout, Workload};

const WIDTH: usize = 6;

/// Two layers with one weight, a frozen layer, and a layer that no loss uses.
#[derive(Module, Debug)]
struct Odd {
    first: Linear,
    second: Linear,
    frozen: Linear,
    unused: Linear,
}

impl Odd {
    fn new(device: &Device) -> Self {
        let linear = || {
            LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(device)
        };
        let first = linear();
        // A parameter is lazy: it has to have its values before it is shared.
        let _ = first.weight.val();
        let mut second = linear();
        second.weight = first.weight.clone();
        Self {
            first,
            second,
            frozen: linear().no_grad(),
            unused: linear(),
        }
    }
}

fn inputs(samples: &[u64], device: &Device) -> Tensor<2> {
    let values: Vec<f32> = samples
        .iter()
        .flat_map(|s| (0..WIDTH as u64).map(|i| feature(*s, i)))
        .collect();
    Tensor::from_data(TensorData::new(values, [samples.len(), WIDTH]), device)
}

fn loss_of(shared: [Tensor<2>; 2], frozen: Tensor<2>, x: Tensor<2>) -> Tensor<1> {
    let [first, second] = shared;
    let hidden = activation::tanh(x.clone().matmul(first));
    (hidden.matmul(second) + x.clone().matmul(frozen) - x)
        .powi_scalar(2)
        .mean()
}

#[derive(Debug, Clone)]
struct OddTask;

impl Workload for OddTask {
    type Model = Odd;

    fn init(&self, device: &Device) -> Result<Odd, BoxError> {
        seeded(device, 5, |device| Ok(Odd::new(device)))
    }

    fn loss(
        &self,
        model: &Odd,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let shared = [model.first.weight.val(), model.second.weight.val()];
        Ok(loss_of(
            shared,
            model.frozen.weight.val(),
            inputs(batch.samples, device),
        ))
    }
}

#[test]
fn tied_weights_get_the_sum_of_their_gradients_and_others_stay() {
    train_by_hand(f64::INFINITY);
}

#[test]
fn clipping_is_by_the_norm_over_all_parameters() {
    let mut norms = train_by_hand(f64::INFINITY);
    norms.sort_by(f64::total_cmp);
    // Between two norms, so that rounding decides nothing.
    let middle = norms.len() / 2;
    let limit = f64::midpoint(norms[middle - 1], norms[middle]);
    let clipped = train_by_hand(limit);
    assert!(clipped.iter().any(|norm| *norm > limit));
    assert!(clipped.iter().any(|norm| *norm < limit));
}

/// Compares training with gradient descent by hand; returns the norms of the gradients before clipping.
fn train_by_hand(clip_norm: f64) -> Vec<f64> {
    let (rate, steps) = (0.2, 20);
    let mut config =
        ExecutorConfig::new(vec![WorkerLayout::new(2, 2, 1), WorkerLayout::new(2, 1, 3)])
            .with_optimizer(SgdConfig::new());
    if clip_norm.is_finite() {
        config = config.with_clip_norm(clip_norm);
    }
    let mut norms = Vec::new();
    let (_, mut start) = run(config, OddTask, 0, rate);
    let before = start.state().unwrap();
    let slots = start.layout().slots().to_vec();
    let names: Vec<_> = slots
        .iter()
        .map(|slot| (slot.path.as_str(), slot.uses))
        .collect();
    assert_eq!(names, [("first.weight", 2), ("unused.weight", 1)]);
    assert_eq!(start.layout().buffers()[0].path, "frozen.weight");

    // Gradient descent by hand, on one leaf.
    let device = Device::flex().autodiff();
    let matrix = |values: &[f32]| -> Tensor<2> {
        Tensor::from_data(TensorData::new(values.to_vec(), [WIDTH, WIDTH]), &device)
    };
    let frozen = matrix(&before.buffers);
    let mut shared = matrix(&before.parameters[slots[0].range()]).require_grad();
    for step in 0..steps {
        let samples = batch(step, 10);
        let loss = loss_of(
            [shared.clone(), shared.clone()],
            frozen.clone(),
            inputs(&samples, &device),
        );
        let gradient = shared.grad(&loss.backward()).unwrap();
        let norm: f32 = gradient.clone().powi_scalar(2).sum().sqrt().into_scalar();
        let scale = (clip_norm / f64::from(norm)).min(1.0);
        let change = gradient.mul_scalar(rate * scale);
        shared = Tensor::from_inner(shared.inner() - change).require_grad();
        let output = start.step(&samples, rate).unwrap();
        assert_eq!(output.clipped, scale < 1.0);
        norms.push(output.gradient_norm);
        assert!((output.gradient_norm - f64::from(norm)).abs() < 1e-5);
    }
    let after = start.state().unwrap();
    let expected: Vec<f32> = shared.into_data().iter::<f32>().collect();
    assert!(
        max_difference(&expected, &before.parameters[slots[0].range()]) > 0.05,
        "the weight is trained"
    );
    let difference = max_difference(&expected, &after.parameters[slots[0].range()]);
    assert!(difference < 1e-5, "tied weight differs by {difference}");
    assert_eq!(
        after.parameters[slots[1].range()],
        before.parameters[slots[1].range()],
        "unused"
    );
    assert_eq!(after.buffers, before.buffers, "frozen");
    let model = start.model().unwrap();
    assert_eq!(
        model.first.weight.val().into_data(),
        model.second.weight.val().into_data(),
        "the tie holds in the model that is given out"
    );
    norms
}

/// Notes where the weights lie in memory when a loss is computed.
#[derive(Clone)]
struct Addresses {
    seen: Arc<Mutex<Vec<(u64, usize)>>>,
}

impl Workload for Addresses {
    type Model = Odd;

    fn init(&self, device: &Device) -> Result<Odd, BoxError> {
        OddTask.init(device)
    }

    fn loss(
        &self,
        model: &Odd,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let weight = model
            .first
            .weight
            .val()
            .inner()
            .try_into_primitive::<Flex>()
            .unwrap();
        let address =
            weight.storage::<f32>().as_ptr() as usize + 4 * weight.layout().start_offset();
        self.seen.lock().unwrap().push((batch.step, address));
        OddTask.loss(model, batch, device)
    }
}

#[test]
fn replicas_of_a_device_share_one_copy_of_the_weights_which_is_updated_in_place() {
    let workload = Addresses {
        seen: Arc::default(),
    };
    let (_, mut executor) = run(
        ExecutorConfig::new(vec![WorkerLayout::new(2, 4, 2)]),
        workload.clone(),
        6,
        1e-3,
    );
    let seen = workload.seen.lock().unwrap().clone();
    assert_eq!(seen.len(), 6 * 8);
    let places: BTreeSet<usize> = seen.iter().map(|(_, address)| *address).collect();
    assert_eq!(
        places.len(),
        1,
        "eight replicas of six steps read one storage"
    );

    // A model that was given out keeps its values while training goes on elsewhere.
    let model = executor.model().unwrap();
    let given = model.first.weight.val().into_data();
    executor.step(&batch(6, 16), 0.1).unwrap();
    assert_eq!(model.first.weight.val().into_data(), given);
    assert_ne!(
        executor.model().unwrap().first.weight.val().into_data(),
        given
    );
}
