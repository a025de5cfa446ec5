//! Observers see every micro-batch's gradient once, in order, and what is reduced.

mod common;

use std::sync::{Arc, Mutex};

use common::{GptTask, MlpTask, batch};
use iidp::{
    BoxError, Communicator, ExecutorConfig, GradientBucket, MicroBatchObserver, MicroBatchRef,
    WorkerLayout,
};

#[derive(Debug, Default, Clone)]
struct Seen {
    micro_batches: Vec<usize>,
    elements: usize,
    squares: f64,
    reduced: Vec<f32>,
    gathered: Vec<f64>,
    committed: usize,
}

/// Measures squared norms of micro-batch gradients in the accumulation pass.
struct Meter {
    seen: Arc<Mutex<Seen>>,
    parameters: usize,
}

impl MicroBatchObserver for Meter {
    fn accumulate(
        &mut self,
        at: &MicroBatchRef,
        accumulator: &mut [f32],
        gradient: &[f32],
    ) -> Result<(), BoxError> {
        let mut seen = self.seen.lock().unwrap();
        if seen.micro_batches.last() != Some(&at.micro_batch) {
            assert_eq!(at.offset, 0, "slices come in order");
            seen.micro_batches.push(at.micro_batch);
        }
        seen.elements += gradient.len();
        for (sum, g) in accumulator.iter_mut().zip(gradient) {
            *sum += at.weight * g;
            seen.squares += f64::from(*g).powi(2);
        }
        Ok(())
    }

    fn reduced(&mut self, bucket: &GradientBucket, gradient: &[f32]) -> Result<(), BoxError> {
        let mut seen = self.seen.lock().unwrap();
        seen.reduced.resize(self.parameters, 0.0);
        seen.reduced[bucket.range.clone()].copy_from_slice(gradient);
        Ok(())
    }

    fn gather(&mut self, communicator: &dyn Communicator) -> Result<(), BoxError> {
        let mut sums = [self.seen.lock().unwrap().squares, 1.0];
        communicator.all_reduce_sum_f64(&mut sums)?;
        self.seen.lock().unwrap().gathered = sums.to_vec();
        Ok(())
    }

    fn committed(&mut self) {
        self.seen.lock().unwrap().committed += 1;
    }
}

fn observe(layouts: Vec<WorkerLayout>) -> (Vec<Seen>, f64, usize) {
    let all: Arc<Mutex<Vec<Arc<Mutex<Seen>>>>> = Arc::default();
    let registry = Arc::clone(&all);
    let config = ExecutorConfig::new(layouts)
        .with_bucket_bytes(512)
        .with_observers(move |context| {
            let seen = Arc::new(Mutex::new(Seen::default()));
            registry.lock().unwrap().push(Arc::clone(&seen));
            Box::new(Meter {
                seen,
                parameters: context.parameters.len(),
            })
        });
    let mut executor = config.init(MlpTask).unwrap();
    let size = executor.global_batch();
    let output = executor.step(&batch(0, size), 1e-3).unwrap();
    assert!(executor.layout().buckets().len() > 1);
    let parameters = executor.layout().len();
    let seen = all
        .lock()
        .unwrap()
        .iter()
        .map(|seen| seen.lock().unwrap().clone())
        .collect();
    (seen, output.gradient_norm, parameters)
}

#[test]
fn observers_see_every_micro_batch_once_whatever_the_layout() {
    let (alone, norm, parameters) = observe(vec![WorkerLayout::new(4, 1, 5)]);
    let (apart, norm_apart, _) =
        observe(vec![WorkerLayout::new(4, 2, 1), WorkerLayout::new(4, 1, 3)]);
    assert_eq!(alone[0].micro_batches, [0, 1, 2, 3, 4]);
    assert_eq!(
        (&*apart[0].micro_batches, &*apart[1].micro_batches),
        (&[0, 1][..], &[2, 3, 4][..])
    );
    assert_eq!(alone[0].elements, 5 * parameters);
    assert_eq!(apart[0].elements + apart[1].elements, 5 * parameters);
    // The sum of squares over all micro-batches, by the observers' own collective.
    let total = alone[0].squares;
    assert_eq!(apart[0].gathered, apart[1].gathered);
    assert!((apart[0].gathered[0] - total).abs() < 1e-9 * total);
    assert_eq!(apart[0].gathered[1], 2.0);
    for seen in alone.iter().chain(&apart) {
        assert_eq!(seen.committed, 1);
        let reduced: f64 = seen
            .reduced
            .iter()
            .map(|g| f64::from(*g).powi(2))
            .sum::<f64>()
            .sqrt();
        assert!((reduced - norm).abs() < 1e-6 * norm, "{reduced} and {norm}");
    }
    assert!((norm - norm_apart).abs() < 1e-6 * norm);
    // The mean gradient is shorter than the micro-batches' mean squared length.
    assert!(norm * norm < total / 5.0);
}

#[test]
fn clipping_scales_to_the_norm() {
    let workload = GptTask {
        tied: false,
        dropout: 0.0,
    };
    let run = |clip: f64| {
        let config = ExecutorConfig::new(vec![WorkerLayout::new(2, 2, 1)]).with_clip_norm(clip);
        let mut executor = config.init(workload.clone()).unwrap();
        executor.step(&batch(0, 4), 1e-3).unwrap()
    };
    let (loose, tight) = (run(1e6), run(1e-3));
    assert!(!loose.clipped);
    assert!(tight.clipped);
    assert_eq!(
        loose.gradient_norm, tight.gradient_norm,
        "the norm is that before clipping"
    );
}
