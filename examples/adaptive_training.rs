//! The main job: a character-level GPT on Shakespeare whose global batch size, learning rate and division of work adapt while it
//! trains, on a simulated cluster of unequal GPUs.
//!
//! ```text
//! cargo run --release --example adaptive_training
//! ```
//!
//! What happens, in the order of this file:
//! 1. the corpus is cut into samples that lie in a `DytisMap`, keyed by position;
//! 2. the planner reads the cluster file and prints the Pareto front of layouts over time and money; one point is chosen;
//! 3. the same job runs three times on that allocation with an equal number of samples: adaptive, fixed small batch, fixed large batch;
//! 4. a table compares them, and an HTML report shows the curves.
//!
//! Gradients are computed here, one logical device (thread) per GPU of the allocation. Seconds and dollars of the cluster are
//! the planner's predictions and labelled *simulated*.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that talks to its user"
)]

use anyhow::{Context, Result, bail};
use clap::Parser;
use hpmd::adaptive_batch::{BatchLimits, NoiseScaleController, ScalingRule};
use hpmd::hp_planner::{ClusterSpec, Objective};
use hpmd::iidp::AdamWConfig;
use hpmd::observer::{Observers, ProgressDisplay, report};
use hpmd::{
    Backend, CharCorpus, CharGptConfig, CharGptTask, SimulatedCluster, StopFlag, Trainer,
    TrainerBuilder, TrainingReport,
};
use std::path::PathBuf;
use std::process::ExitCode;

/// Trains a character-level GPT with an adapting batch size and compares it with fixed ones.
#[derive(Debug, Parser)]
struct Options {
    /// Cluster file: GPU types, counts, links, prices.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/cluster.toml"))]
    cluster: PathBuf,
    /// Text to train on, UTF-8.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/shakespeare.txt"))]
    corpus: PathBuf,
    /// Point of the Pareto front: knee, fastest or cheapest.
    #[arg(long, default_value = "knee")]
    objective: String,
    /// Train on this many local devices of unequal speed instead of a simulated cluster.
    #[arg(long)]
    devices: Option<usize>,
    /// Smallest global batch, in samples; where the adaptive run begins. At least one micro-batch per device.
    #[arg(long, default_value_t = 16)]
    min_batch: usize,
    /// Largest global batch, in samples.
    #[arg(long, default_value_t = 256)]
    max_batch: usize,
    /// Samples per micro-batch.
    #[arg(long, default_value_t = 8)]
    local_batch: usize,
    /// Samples per run, a multiple of the local batch.
    #[arg(long, default_value_t = 12_000)]
    samples: u64,
    /// Learning rate at the smallest batch.
    #[arg(long, default_value_t = 2e-3, allow_negative_numbers = true)]
    learning_rate: f64,
    /// Steps between decisions.
    #[arg(long, default_value_t = 20)]
    interval: u64,
    /// Batch size as a multiple of the gradient noise scale.
    #[arg(long, default_value_t = 2.0, allow_negative_numbers = true)]
    multiple: f64,
    /// Transformer blocks.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Channels of the model.
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Characters that the model sees at once.
    #[arg(long, default_value_t = 64)]
    context: usize,
    /// Seed of weights and sample order.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Burn device: flex (CPU), wgpu or cuda; the last two need the feature of that name.
    #[arg(long, default_value = "flex")]
    device: String,
    /// Only 20 steps of the adaptive run, to see that everything works.
    #[arg(long)]
    smoke: bool,
    /// Where the report goes.
    #[arg(long, default_value = "target/adaptive_training.html")]
    report: PathBuf,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let stop = StopFlag::new();
    let raised = stop.clone();
    ctrlc::set_handler(move || raised.raise()).context("no handler for Ctrl-C")?;
    check(options)?;

    let task = task(options)?;
    let corpus = task.corpus();
    println!(
        "corpus: {} characters in the vocabulary, {} training and {} validation samples of {} characters; loss of a uniform guess {:.2} nats",
        corpus.vocabulary().len(),
        corpus.training_samples().len(),
        corpus.validation_samples().len(),
        options.context,
        (corpus.vocabulary().len() as f64).ln(),
    );
    let cluster = match options.devices {
        Some(_) => None,
        None => Some(plan(options, &task)?),
    };

    // An unusable path should be known before the training, not after it.
    report::write(&options.report, TITLE, &[])?;
    let runs = [
        Run::Adaptive,
        Run::Fixed("fixed small", options.min_batch),
        Run::Fixed("fixed large", options.max_batch),
    ];
    let mut reports = Vec::new();
    let mut outcome = Ok(());
    for kind in runs.iter().take(if options.smoke { 1 } else { runs.len() }) {
        match kind.train(options, cluster.as_ref(), &stop) {
            Ok(report) => reports.push(report),
            // What was done before is reported all the same.
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
        if stop.is_raised() {
            println!("interrupted: what was done so far follows");
            break;
        }
    }
    if !reports.is_empty() {
        print_table(&reports);
        report::write(&options.report, TITLE, &reports)?;
        println!("\nreport: {}", options.report.display());
    }
    outcome
}

const TITLE: &str = "Adaptive training of a character-level GPT";

/// What no library would notice, because every value is fine by itself.
fn check(options: &Options) -> Result<()> {
    if options.local_batch == 0 || options.min_batch == 0 {
        bail!(
            "--min-batch {} and --local-batch {} must be at least 1",
            options.min_batch,
            options.local_batch
        );
    }
    if !options.multiple.is_finite() || options.multiple <= 0.0 {
        bail!("--multiple {} must be positive", options.multiple);
    }
    if options.min_batch > options.max_batch {
        bail!(
            "--min-batch {} is larger than --max-batch {}",
            options.min_batch,
            options.max_batch
        );
    }
    Ok(())
}

fn task(options: &Options) -> Result<CharGptTask> {
    // A few dozen validation samples are enough to see that everything works.
    let validation = if options.smoke { 0.002 } else { 0.05 };
    let corpus = CharCorpus::from_path(
        &options.corpus,
        options.context,
        options.context,
        validation,
    )?;
    let shape = CharGptConfig {
        layers: options.layers,
        width: options.width,
        heads: options.heads,
        dropout: 0.0,
    };
    Ok(CharGptTask::new(corpus, shape))
}

/// Prints the Pareto front for the largest batch, at which most of the samples will be seen, and picks a point of it.
fn plan(options: &Options, task: &CharGptTask) -> Result<SimulatedCluster> {
    let objective = match options.objective.as_str() {
        "knee" => Objective::Knee,
        "fastest" => Objective::Fastest,
        "cheapest" => Objective::Cheapest,
        other => bail!("--objective {other}: expected knee, fastest or cheapest"),
    };
    let spec = ClusterSpec::from_path(&options.cluster)?;
    let batch = options.max_batch;
    let cluster = SimulatedCluster::plan_for(task, spec, batch, options.local_batch, objective)?;
    println!(
        "\nPareto front on {} at a global batch of {batch} (simulated):",
        options.cluster.display()
    );
    println!("  {:>10} {:>14}  layout", "ms/step", "$/1000 steps");
    for (i, (seconds, cost, layout)) in cluster.front_view().points.into_iter().enumerate() {
        let mark = if i == cluster.chosen_index() {
            "<- chosen"
        } else {
            ""
        };
        println!(
            "  {:>10.3} {:>14.5}  {layout} {mark}",
            seconds * 1e3,
            cost * 1e3
        );
    }
    println!();
    Ok(cluster)
}

/// One of the runs that are compared.
enum Run {
    Adaptive,
    Fixed(&'static str, usize),
}

impl Run {
    fn train(
        &self,
        options: &Options,
        cluster: Option<&SimulatedCluster>,
        stop: &StopFlag,
    ) -> Result<TrainingReport> {
        let mut builder = Trainer::builder(task(options)?)
            .optimizer(AdamWConfig::new().with_weight_decay(0.01))
            .clip_norm(1.0)
            .warmup_samples(options.samples / 20)
            .local_batch(options.local_batch)
            .samples(options.samples)
            .validate_every((options.samples / 4).max(1))
            .interval(options.interval)
            .smoothing(0.97)
            .seed(options.seed)
            .observers(Observers::none().with(ProgressDisplay::new()))
            .stop_flag(stop.clone());
        builder = match (cluster, options.devices) {
            (Some(cluster), _) => builder.planned(cluster.clone()),
            // Every other device is half as fast as its neighbour.
            (None, devices) => builder.device_speeds(
                (0..devices.unwrap_or(1))
                    .map(|i| 1.0 / (1 + i % 2) as f64)
                    .collect(),
            ),
        };
        if let Some(device) = options
            .device
            .parse::<Backend>()?
            .devices()?
            .into_iter()
            .next()
        {
            builder = builder.device(device);
        }
        if options.smoke {
            builder = builder.step_limit(20).interval(5);
        }
        Ok(self.sized(builder, options)?.build()?.run()?)
    }

    /// The batch size, and the learning rate that the square-root rule gives it.
    fn sized(
        &self,
        builder: TrainerBuilder<CharGptTask>,
        options: &Options,
    ) -> Result<TrainerBuilder<CharGptTask>> {
        Ok(match *self {
            Self::Adaptive => {
                let limits = BatchLimits::new(
                    options.min_batch as u64,
                    options.max_batch as u64,
                    options.local_batch as u64,
                )?
                .hysteresis(0.1)?
                .largest_change(2.0)?;
                builder
                    .name("adaptive")
                    .initial_batch(options.min_batch)
                    .learning_rate(options.learning_rate)
                    .scaling_rule(ScalingRule::Sqrt)
                    .controller(NoiseScaleController::new(options.multiple, limits)?)
            }
            Self::Fixed(name, batch) => {
                let rate =
                    ScalingRule::Sqrt.factor(options.min_batch as u64, batch as u64, None)?
                        * options.learning_rate;
                builder
                    .name(format!("{name} ({batch})"))
                    .initial_batch(batch)
                    .learning_rate(rate)
            }
        })
    }
}

fn print_table(reports: &[TrainingReport]) {
    let optional = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"))
    };
    println!(
        "\n{:<20} {:>7} {:>9} {:>14} {:>19} {:>18} {:>16}",
        "run",
        "steps",
        "samples",
        "wall here (s)",
        "simulated time (s)",
        "simulated cost ($)",
        "validation loss"
    );
    for r in reports {
        println!(
            "{:<20} {:>7} {:>9} {:>14.1} {:>19} {:>18} {:>16}",
            r.name,
            r.steps.len(),
            r.samples(),
            r.wall_seconds(),
            optional(r.simulated_seconds(), 2),
            optional(r.simulated_cost(), 5),
            optional(r.validation_loss(), 4),
        );
    }
}
