//! A small command line around `hp-planner`: plan, predict, evaluate, simulate, jabas.
//!
//! ```text
//! cargo run --release --example plan -- plan --cluster examples/data/cluster.toml --model examples/data/model.toml --training examples/data/training.toml
//! ```

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that talks to its user"
)]

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use hp_planner::cost::constants::BOUNDS;
use hp_planner::cost::memory::MEMORY_BOUNDS;
use hp_planner::export::{self, Launcher};
use hp_planner::jabas::{JabasOptions, JabasProfile};
use hp_planner::simulate::{SimulationOptions, simulate};
use hp_planner::{
    AnalyticCost, Calibration, ClusterSpec, Evaluator, Infeasible, MeasuredRow, ModelSpec,
    Objective, Planner, Problem, Profile, TrainingSpec, split,
};

#[derive(Parser)]
#[command(about = "Plans hybrid-parallel training: time, memory and money of configurations")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the front over time and money, and the plan that the objective asks for
    Plan(PlanArgs),
    /// Predict time and memory of the rows of a table; CSV on standard output
    Predict(PredictArgs),
    /// Compare predictions with measurements that calibration has not seen
    Evaluate(EvaluateArgs),
    /// Replay adaptive jobs from measured traces under five policies
    Simulate(SimulateArgs),
    /// Solve JABAS's configuration problem for its profile folder
    Jabas(JabasArgs),
}

#[derive(Args)]
struct PlanArgs {
    #[arg(long)]
    cluster: PathBuf,
    #[arg(long)]
    model: PathBuf,
    #[arg(long)]
    training: PathBuf,
    /// fastest, cheapest, knee, budget=MONEY, deadline=SECONDS, weighted=TIME,COST or min-product
    #[arg(long, default_value = "knee")]
    objective: Objective,
    /// Seconds after which the search ends with what it has found
    #[arg(long)]
    time_limit: Option<f64>,
    /// Write the report as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write the front as a self-contained page
    #[arg(long)]
    html: Option<PathBuf>,
    /// Print the chosen plan for a launcher: megatron, deepspeed, torchtitan or iidp
    #[arg(long)]
    export: Option<Launcher>,
}

#[derive(Args)]
struct PredictArgs {
    /// Measured rows to fit the constants to; without it the catalogue's constants are used
    #[arg(long)]
    calibrate: Option<PathBuf>,
    /// Rows to predict
    rows: PathBuf,
    /// Print the fitted constants on standard error
    #[arg(long)]
    verbose: bool,
}

#[derive(Args)]
struct EvaluateArgs {
    /// Rows to fit to
    #[arg(long, requires = "test", conflicts_with = "split")]
    train: Option<PathBuf>,
    /// Rows to compare with
    #[arg(long)]
    test: Option<PathBuf>,
    /// Fraction of the rows of FILE to fit to; the others are compared
    #[arg(long, requires = "file", value_parser = fraction)]
    split: Option<f64>,
    /// Number of random splits
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Rows to split
    file: Option<PathBuf>,
    /// Print the fitted constants on standard error
    #[arg(long)]
    verbose: bool,
}

#[derive(Args)]
struct SimulateArgs {
    /// Folder with one folder per job
    #[arg(long)]
    trace: PathBuf,
    #[arg(long)]
    cluster: PathBuf,
    /// Seed of the preemptions of spot groups
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Args)]
struct JabasArgs {
    /// Folder that JABAS's profiler wrote
    dir: PathBuf,
    /// Global batches to solve for
    #[arg(long = "batch", value_delimiter = ',', default_values_t = [64, 128, 256, 512, 1024, 2048, 4096])]
    batches: Vec<u64>,
    /// Meet every batch exactly, where JABAS takes the nearest even multiple of a local batch
    #[arg(long)]
    exact: bool,
}

/// A fraction of rows that leaves some on both sides.
fn fraction(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if value > 0.0 && value < 1.0 {
        Ok(value)
    } else {
        Err("expected a number between 0 and 1, both excluded".to_owned())
    }
}

fn main() {
    if let Err(error) = run(Cli::parse().command) {
        eprintln!("error: {error:#}");
        std::process::exit(1);
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Plan(args) => plan(&args),
        Command::Predict(args) => predict(&args),
        Command::Evaluate(args) => evaluate(&args),
        Command::Simulate(args) => replay(&args),
        Command::Jabas(args) => jabas(&args),
    }
}

fn plan(args: &PlanArgs) -> Result<()> {
    let mut planner = Planner::new(
        ClusterSpec::from_path(&args.cluster)?,
        ModelSpec::from_path(&args.model)?,
        TrainingSpec::from_path(&args.training)?,
    );
    if let Some(seconds) = args.time_limit {
        let limit = Duration::try_from_secs_f64(seconds)
            .with_context(|| format!("time limit of {seconds} s"))?;
        planner = planner.with_time_limit(limit);
    }
    let report = planner.plan()?;
    println!("{report}");
    let choice = report.select(args.objective)?;
    let plan = &choice.point.payload;
    println!("choice ({}): {}", args.objective, report.devices(plan));
    if let Some(shortfall) = choice.shortfall {
        let unit = match args.objective {
            Objective::Deadline(_) => " s",
            _ => "",
        };
        println!("  misses the limit by {}{unit}", significant(shortfall));
    }
    let time = &plan.estimate.time;
    for (name, seconds) in [
        ("compute", time.compute),
        ("model-parallel collectives", time.model_parallel),
        ("pipeline bubble", time.bubble),
        ("data-parallel reduction", time.data_parallel),
        ("optimizer update", time.update),
        ("overhead", time.overhead),
    ] {
        println!("  {name:<27} {seconds:>12.6} s");
    }
    println!("  {:<27} {:>12.6} s", "iteration", plan.iteration_time());
    if plan.configuration.dims.pp > 1 {
        let problem = Problem {
            cluster: planner.cluster(),
            model: planner.model(),
            training: planner.training(),
        };
        let simulated = AnalyticCost::new().simulated_time(&problem, &plan.configuration)?;
        let total = simulated.total();
        println!("  {:<27} {total:>12.6} s", "  its schedule simulated");
    }
    println!(
        "  {:<27} {:>12}",
        "money per iteration",
        significant(plan.iteration_cost())
    );
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &args.html {
        let html = export::html(&report, Some(choice.index));
        std::fs::write(path, html).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(format) = args.export {
        print!(
            "{}",
            export::export(
                format,
                &plan.configuration,
                planner.cluster(),
                planner.model(),
                planner.training()
            )?
        );
    }
    Ok(())
}

/// Six decimals, or four digits with an exponent where six decimals would say little.
fn significant(value: f64) -> String {
    if value != 0.0 && value < 0.001 {
        format!("{value:.3e}")
    } else {
        format!("{value:.6}")
    }
}

fn calibration(path: Option<&PathBuf>) -> Result<Calibration> {
    Ok(match path {
        Some(path) => Calibration::fit(&Profile::from_path(path)?)?,
        None => Calibration::catalogue(),
    })
}

fn predict(args: &PredictArgs) -> Result<()> {
    let calibration = calibration(args.calibrate.as_ref())?;
    if args.verbose {
        explain(&calibration);
    }
    let profile = Profile::from_path(&args.rows)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "id,iter_s,iter_s_low,iter_s_high,mem_gib,status")?;
    for row in &profile.rows {
        let prediction = calibration.predict(row);
        let number =
            |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.6}"));
        let status = match &prediction.reason {
            None => "ok".to_owned(),
            Some(Infeasible::Unsupported(what)) => format!("unsupported: {what}"),
            Some(reason) => format!("infeasible: {reason}"),
        };
        writeln!(
            out,
            "{},{},{},{},{},{}",
            quoted(row.id()),
            number(prediction.iteration_time),
            number(prediction.interval.map(|(low, _)| low)),
            number(prediction.interval.map(|(_, high)| high)),
            number(prediction.memory_gib),
            quoted(&status)
        )?;
    }
    Ok(())
}

/// A CSV cell, in quotes where it needs them.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n']) {
        format!("\"{}\"", cell.replace('"', "\"\""))
    } else {
        cell.to_owned()
    }
}

fn evaluate(args: &EvaluateArgs) -> Result<()> {
    let mut evaluator = Evaluator::new();
    match (&args.train, &args.test, args.split, &args.file) {
        (Some(train), Some(test), None, None) => {
            let calibration = calibration(Some(train))?;
            if args.verbose {
                explain(&calibration);
            }
            let test = Profile::from_path(test)?;
            evaluator.add(&calibration, &test.rows.iter().collect::<Vec<_>>());
        }
        (None, None, Some(fraction), Some(file)) => {
            let profile = Profile::from_path(file)?;
            for seed in 0..args.seeds {
                let inside = split(profile.rows.len(), fraction, seed);
                let part = |wanted: bool| -> Vec<&MeasuredRow> {
                    let rows = profile.rows.iter().zip(&inside);
                    rows.filter(|(_, is)| **is == wanted)
                        .map(|(row, _)| row)
                        .collect()
                };
                let calibration = Calibration::fit_rows(&part(true))?;
                if args.verbose && seed == 0 {
                    explain(&calibration);
                }
                evaluator.add(&calibration, &part(false));
            }
        }
        _ => bail!("give either --train FILE --test FILE or --split FRACTION FILE"),
    }
    print!("{}", evaluator.finish());
    Ok(())
}

fn replay(args: &SimulateArgs) -> Result<()> {
    let cluster = ClusterSpec::from_path(&args.cluster)?;
    let options = SimulationOptions {
        seed: args.seed,
        ..SimulationOptions::default()
    };
    print!("{}", simulate(&args.trace, &cluster, &options)?);
    Ok(())
}

fn jabas(args: &JabasArgs) -> Result<()> {
    let profile = JabasProfile::from_dir(&args.dir)?;
    let options = JabasOptions {
        exact_batch: args.exact,
        ..JabasOptions::default()
    };
    println!(
        "{:>8} {:>8} {:>8} {:>12} {:>12}  workers x rounds per unit",
        "asked", "global", "local", "iteration s", "samples/s"
    );
    for &batch in &args.batches {
        let plan = profile.solve(batch, options)?;
        let units: Vec<String> = plan
            .units
            .iter()
            .map(|unit| {
                let server = &profile.servers[unit.server];
                format!("{} {}x{}", server.name, unit.workers, unit.rounds)
            })
            .collect();
        println!(
            "{batch:>8} {:>8} {:>8} {:>12.6} {:>12.3}  {}",
            plan.global_batch,
            plan.local_batch,
            plan.iteration_time,
            plan.throughput(),
            units.join(", ")
        );
    }
    Ok(())
}

fn explain(calibration: &Calibration) {
    for (key, fit) in calibration.fits() {
        eprintln!(
            "{} on {}: {} rows, {:?}, factor {:.4}, held-out error {:.2} %, 90 % interval {:+.1} % to {:+.1} %",
            key.framework,
            key.gpu,
            fit.rows,
            fit.kind,
            fit.factor,
            100.0 * fit.error,
            100.0 * fit.interval.0.exp_m1(),
            100.0 * fit.interval.1.exp_m1(),
        );
        for (bound, value) in BOUNDS.iter().zip(fit.constants.to_array()) {
            eprintln!(
                "  {:<20} {value:>12.6}   in [{}, {}]",
                bound.name, bound.least, bound.most
            );
        }
        if !fit.shapes.is_empty() {
            let factors = fit.shapes.iter().flat_map(|(_, f)| [f.block, f.ends]);
            let (least, most) = factors.fold((f64::INFINITY, 0.0_f64), |(least, most), f| {
                (least.min(f), most.max(f))
            });
            eprintln!(
                "  {} shape factors from {least:.3} to {most:.3}   in [0.5, 2]",
                fit.shapes.len()
            );
        }
        if !fit.layers.is_empty() {
            let rows: usize = fit.layers.iter().map(|profile| profile.rows).sum();
            eprintln!(
                "  {} layer profiles of {rows} rows, coefficients in [0, inf)",
                fit.layers.len()
            );
        }
    }
    for (framework, fit) in calibration.memory() {
        eprintln!("{framework}: memory, {} rows", fit.rows);
        for (bound, value) in MEMORY_BOUNDS.iter().zip(fit.constants.to_array()) {
            eprintln!(
                "  {:<20} {value:>12.6}   in [{}, {}]",
                bound.name, bound.least, bound.most
            );
        }
    }
}
