//! Data-parallel training over processes, equal bit for bit to the same training over the threads of one process.
//!
//! ```text
//! mpirun -n 3 target/debug/examples/mpi_training
//! ```
//!
//! Every process is one rank with its own number of virtual workers and accumulation steps. At the end rank 0 repeats the run over threads and compares the parameters.

#![allow(clippy::print_stdout, reason = "an example talks to its reader")]

use std::error::Error;
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use iidp::models::{Mlp, MlpConfig};
use iidp::{
    AdamWConfig, BoxError, Communicator, Executor, ExecutorConfig, MicroBatch, MpiCommunicator,
    ShardedSampler, WorkerLayout, Workload,
};

/// Samples of the data set.
const SAMPLES: u64 = 600;
const STEPS: usize = 40;
const FEATURES: usize = 8;

/// Learns which of three bands the sum of a sample's features lies in.
#[derive(Debug)]
struct Bands;

impl Bands {
    /// Feature `place` of a sample, in -1..1.
    fn feature(sample: u64, place: usize) -> f32 {
        let angle = (sample as f32 + 1.0) * (place as f32 + 1.7) * 0.618;
        (angle * 1.9).sin()
    }
}

impl Workload for Bands {
    type Model = Mlp;

    fn init(&self, device: &Device) -> Result<Mlp, BoxError> {
        device.seed(7);
        Ok(MlpConfig::new([FEATURES, 32, 3]).init(device)?)
    }

    fn loss(
        &self,
        model: &Mlp,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let rows = batch.samples.len();
        let features: Vec<f32> = batch
            .samples
            .iter()
            .flat_map(|sample| (0..FEATURES).map(|place| Self::feature(*sample, place)))
            .collect();
        let bands: Vec<i32> = features
            .chunks(FEATURES)
            .map(|features| {
                let sum: f32 = features.iter().sum();
                i32::from(sum > -0.7) + i32::from(sum > 0.7)
            })
            .collect();
        let inputs = Tensor::<2>::from_data(TensorData::new(features, [rows, FEATURES]), device);
        let targets = Tensor::<1, Int>::from_data(TensorData::new(bands, [rows]), device);
        Ok(model.loss(inputs, targets))
    }
}

/// Unequal shares: rank r runs 1 or 2 workers with 1 to 3 accumulation steps.
fn layouts(ranks: usize) -> Vec<WorkerLayout> {
    (0..ranks)
        .map(|rank| WorkerLayout::new(4, 1 + rank % 2, 1 + rank % 3))
        .collect()
}

/// Trains, reports the loss through `report`, returns the parameters.
fn train(
    mut executor: Executor<Bands>,
    report: impl Fn(usize, f64),
) -> Result<Vec<f32>, Box<dyn Error>> {
    let mut sampler = ShardedSampler::new(SAMPLES, 3)?;
    for step in 0..STEPS {
        let samples = sampler.take(executor.global_batch())?;
        let output = executor.step(&samples, 0.01)?;
        report(step, output.loss);
    }
    Ok(executor.parameters()?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let timeout = Duration::from_mins(1);
    let world = MpiCommunicator::world(timeout)?;
    let (rank, ranks) = (world.rank(), world.size());
    let config = || {
        ExecutorConfig::new(layouts(ranks))
            .with_optimizer(AdamWConfig::new())
            .with_clip_norm(1.0)
            .with_timeout(timeout)
    };
    // Rank 0 compares while the others wait at this barrier.
    let end = world.split(0, rank)?;
    let executor = config().init_with(Bands, vec![Box::new(world)])?;
    let over_processes = train(executor, |step, loss| {
        if rank == 0 && step % 10 == 0 {
            println!("step {step:>3} loss {loss:.4}");
        }
    })?;
    if rank == 0 {
        let over_threads = train(config().init(Bands)?, |_, _| {})?;
        let bits = |values: &[f32]| {
            values
                .iter()
                .map(|value| value.to_bits())
                .collect::<Vec<_>>()
        };
        if bits(&over_processes) != bits(&over_threads) {
            return Err(end
                .abort("processes and threads ended with different parameters")
                .into());
        }
        println!(
            "OK {ranks} processes and {ranks} threads end with the same {} parameters",
            over_threads.len()
        );
    }
    end.barrier()?;
    Ok(())
}
