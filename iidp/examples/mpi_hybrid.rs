//! Hybrid layouts over MPI against the same layouts over threads, to be started under `mpirun` by `scripts/mpi_tests.sh`.
//!
//! `mpi_hybrid DP TP PP` trains a small GPT on as many processes, and on the same number of threads in each process; losses and parameters must agree to the bit.

#![allow(clippy::print_stdout, reason = "the script reads what each rank found")]

use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use iidp::communicator::{Communicator, MpiCommunicator};
use iidp::hybrid::{HybridState, HybridWorkload};
use iidp::models::BlockGptConfig;
use iidp::pipeline::{Activation, StageContext};
use iidp::{BoxError, Error, HybridConfig, HybridExecutor, MicroBatch, ParallelDims, WorkerLayout};

const TOKENS: usize = 8;
const STEPS: usize = 5;

struct Sequences(BlockGptConfig);

fn ids(batch: &MicroBatch<'_>, offset: u64) -> Vec<i32> {
    let of = |id: &u64| {
        let id = *id;
        (0..TOKENS as u64).map(move |i| ((id + i + offset).pow(2) / 3 % 16) as i32)
    };
    batch.samples.iter().flat_map(of).collect()
}

impl HybridWorkload for Sequences {
    type Model = BlockGptConfig;

    fn model(&self) -> &BlockGptConfig {
        &self.0
    }

    fn input(&self, batch: &MicroBatch<'_>, device: &Device) -> Result<Activation, BoxError> {
        let ids: Vec<f32> = ids(batch, 0).into_iter().map(|id| id as f32).collect();
        let data = TensorData::new(ids, [batch.samples.len(), TOKENS]);
        Ok(Activation::new(Tensor::<2>::from_data(data, device)))
    }

    fn loss(&self, output: Activation, context: &StageContext<'_>) -> Result<Tensor<1>, BoxError> {
        let data = TensorData::new(
            ids(&context.batch, 1),
            [context.batch.samples.len(), TOKENS],
        );
        let targets = Tensor::<2, Int>::from_data(data, &output.device());
        Ok(BlockGptConfig::loss(output, targets, context.group)?)
    }
}

fn config(dims: ParallelDims) -> HybridConfig {
    HybridConfig::new(dims, vec![WorkerLayout::new(1, 1, 4 / dims.dp); dims.dp])
        .with_clip_norm(1.0)
        .with_seed(5)
        .with_timeout(Duration::from_secs(60))
}

fn workload() -> Sequences {
    Sequences(BlockGptConfig::new(16, TOKENS, 2, 16, 4).with_tied(true))
}

fn train(mut executor: HybridExecutor<Sequences>) -> Result<(Vec<f64>, HybridState), Error> {
    let size = executor.global_batch();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let ids: Vec<u64> = (0..size).map(|i| (step * size + i) as u64 * 7).collect();
        losses.push(executor.step(&ids, 3e-3)?.loss);
    }
    Ok((losses, executor.state()?))
}

fn run() -> Result<String, String> {
    let arguments: Vec<usize> = std::env::args()
        .skip(1)
        .map(|argument| {
            argument
                .parse()
                .map_err(|error| format!("{argument}: {error}"))
        })
        .collect::<Result<_, _>>()?;
    let [dp, tp, pp] = arguments[..] else {
        return Err("expected DP TP PP".to_owned());
    };
    let dims = ParallelDims::new(dp, tp, pp);
    let text = |error: Error| error.to_string();
    let world = MpiCommunicator::world(Duration::from_secs(60)).map_err(text)?;
    let rank = world.rank();
    let processes = config(dims)
        .init_with(workload(), vec![Box::new(world)])
        .and_then(train)
        .map_err(text)?;
    let threads = config(dims)
        .init(workload())
        .and_then(train)
        .map_err(text)?;
    if processes != threads {
        return Err(format!(
            "rank {rank}: losses {:?} over processes, {:?} over threads; equal states: {}",
            processes.0,
            threads.0,
            processes.1 == threads.1
        ));
    }
    Ok(format!(
        "OK rank {rank} of {dp} x {tp} x {pp}, loss {}",
        threads.0[STEPS - 1]
    ))
}

fn main() -> ExitCode {
    match run() {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            println!("FAILED {text}");
            ExitCode::FAILURE
        }
    }
}
