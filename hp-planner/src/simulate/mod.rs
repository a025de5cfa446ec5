//! Replay of adaptive jobs from measured traces under policies that choose batch and GPUs.
//!
//! A job has to make a given progress, measured in steps of its base batch. The traces say how many steps of each larger
//! batch make the same progress, and how long a step takes on each number of GPUs of each type. The job is cut into equal
//! parts of progress; a policy chooses batch and GPUs for each; changing GPUs costs a restart, changing only the batch
//! nothing. GPUs of spot groups are taken away at random times from a fixed seed; the job then restarts on as many GPUs of
//! the group as come back, having lost what it did since the part's last checkpoint, on average half the checkpoint
//! interval.

mod policy;
mod trace;

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use policy::Policy;
pub use trace::{JobTrace, Progress, Speed};

use crate::cluster::ClusterSpec;
use crate::error::{Error, Result};

/// Rules of the replay.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SimulationOptions {
    /// Parts of equal progress at whose borders policies choose.
    pub parts: usize,
    /// Seconds of a restart on other GPUs.
    pub restart_seconds: f64,
    /// Target of the similarity of the gradients of two halves of a batch, between 0 and 1.
    pub similarity: f64,
    /// Mean seconds between preemptions of a spot group.
    pub preemption_seconds: f64,
    /// Seconds between checkpoints.
    pub checkpoint_seconds: f64,
    /// Seed of the preemptions.
    pub seed: u64,
}

impl Default for SimulationOptions {
    fn default() -> Self {
        Self {
            parts: 20,
            restart_seconds: 30.0,
            similarity: 0.5,
            preemption_seconds: 7200.0,
            checkpoint_seconds: 600.0,
            seed: 0,
        }
    }
}

/// Longest job in seconds, some three hundred years.
const LONGEST_JOB: f64 = 1e10;

/// Batch and GPUs, with the measured time of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Setting {
    batch: u64,
    group: usize,
    gpus: u32,
    step_time: f64,
    /// Money per hour.
    price: f64,
}

impl Setting {
    fn same_gpus(&self, other: &Self) -> bool {
        (self.group, self.gpus) == (other.group, other.gpus)
    }
}

/// A trace on a cluster.
#[derive(Debug)]
struct Job<'a> {
    trace: &'a JobTrace,
    options: &'a SimulationOptions,
    settings: Vec<Setting>,
}

impl<'a> Job<'a> {
    fn new(
        trace: &'a JobTrace,
        cluster: &ClusterSpec,
        options: &'a SimulationOptions,
    ) -> Result<Self> {
        let mut settings = Vec::new();
        for (index, group) in cluster.groups.iter().enumerate() {
            let Some(speed) = speed(trace, &group.gpu) else {
                continue;
            };
            for gpus in speed.gpus().filter(|&gpus| gpus <= group.gpus()) {
                for &batch in trace.progress.keys() {
                    if let Some(step_time) = speed.step_time(gpus, batch) {
                        let price = f64::from(gpus) * cluster.price_per_gpu_hour(index);
                        settings.push(Setting {
                            batch,
                            group: index,
                            gpus,
                            step_time,
                            price,
                        });
                    }
                }
            }
        }
        if settings.is_empty() {
            let known: Vec<String> = trace
                .speeds
                .keys()
                .map(|machine| match machine.as_str() {
                    "aws" => "T4 (aws)".to_owned(),
                    "azure" => "V100 (azure)".to_owned(),
                    "dgx" => "A100 (dgx)".to_owned(),
                    "rtx" => "RTX (rtx)".to_owned(),
                    "quad" => "QUADRO-RTX6000 (quad)".to_owned(),
                    other => other.to_owned(),
                })
                .collect();
            let have: Vec<&str> = cluster
                .groups
                .iter()
                .map(|group| group.gpu.as_str())
                .collect();
            return Err(Error::field(
                "groups.gpu",
                have.join(", "),
                format!(
                    "a GPU type that the trace {} knows: {}",
                    trace.name,
                    known.join(", ")
                ),
            ));
        }
        Ok(Self {
            trace,
            options,
            settings,
        })
    }

    fn parts(&self) -> usize {
        self.options.parts
    }

    /// Progress at which a part begins and ends.
    fn bounds(&self, part: usize) -> (f64, f64) {
        let each = self.trace.goal() / self.options.parts as f64;
        (part as f64 * each, (part + 1) as f64 * each)
    }

    /// Refuses a job so long that its replay, preemption by preemption, would not end in sensible time.
    fn ends(&self, choices: &[usize]) -> Result<()> {
        let seconds: f64 = choices
            .iter()
            .enumerate()
            .map(|(part, &choice)| self.seconds(part, &self.settings[choice]))
            .sum();
        crate::cluster::positive("job time", seconds, 0.0, LONGEST_JOB, "seconds")
            .map_err(|error| error.within(&self.trace.name))
    }

    /// Seconds of a part in a setting.
    fn seconds(&self, part: usize, setting: &Setting) -> f64 {
        let (from, to) = self.bounds(part);
        let steps = self
            .trace
            .progress
            .get(&setting.batch)
            .map_or(f64::INFINITY, |progress| progress.steps(from, to));
        steps * setting.step_time
    }
}

/// The trace's step times for a GPU of the catalogue: by the name of its file, or by the cloud instances and machines that
/// the public traces of Pollux and Sia were measured on.
fn speed<'a>(trace: &'a JobTrace, gpu: &str) -> Option<&'a Speed> {
    let gpu = gpu.to_ascii_lowercase();
    let machine = if gpu == "t4" {
        "aws"
    } else if gpu.starts_with("a100") {
        "dgx"
    } else if gpu.starts_with("v100") {
        "azure"
    } else if gpu.starts_with("rtx") {
        "rtx"
    } else if gpu.starts_with("quadro") {
        "quad"
    } else {
        return trace.speeds.get(&gpu);
    };
    trace.speeds.get(&gpu).or_else(|| trace.speeds.get(machine))
}

/// What a job took under a policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicyResult {
    /// The job.
    pub job: String,
    /// The policy.
    pub policy: Policy,
    /// Seconds until the goal.
    pub time: f64,
    /// Money.
    pub cost: f64,
    /// GPU hours paid for.
    pub gpu_hours: f64,
    /// Changes of GPUs chosen by the policy.
    pub switches: u32,
    /// Preemptions met.
    pub preemptions: u32,
    /// Global batch at the end.
    pub last_batch: u64,
}

/// Results of all jobs under all policies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SimulationReport {
    /// Job by job, policy by policy.
    pub rows: Vec<PolicyResult>,
}

/// Replays all jobs below `traces` on a cluster under every [`Policy`].
///
/// The same input gives the same result. Computes in O(parts x settings^2 x front) per job.
///
/// # Errors
/// Those of [`JobTrace::all_from_dir`]; [`Error::Field`] if an option is not allowed, no GPU of the cluster was measured, or a
/// job takes longer than 1e10 s.
pub fn simulate(
    traces: impl AsRef<Path>,
    cluster: &ClusterSpec,
    options: &SimulationOptions,
) -> Result<SimulationReport> {
    cluster.validate()?;
    options.validate()?;
    let mut rows = Vec::new();
    for trace in JobTrace::all_from_dir(traces)? {
        let job = Job::new(&trace, cluster, options)?;
        for policy in Policy::ALL {
            let choices = policy.choose(&job)?;
            job.ends(&choices)?;
            rows.push(replay(&job, cluster, policy, &choices));
        }
    }
    Ok(SimulationReport { rows })
}

impl SimulationOptions {
    fn validate(&self) -> Result<()> {
        crate::cluster::count("parts", self.parts as u64, 1, 10_000)?;
        let positive = crate::cluster::positive;
        positive("restart_seconds", self.restart_seconds, 0.0, 1e7, "seconds")?;
        positive("similarity", self.similarity, 1e-6, 1.0 - 1e-6, "(cosine)")?;
        positive(
            "preemption_seconds",
            self.preemption_seconds,
            1.0,
            1e12,
            "seconds",
        )?;
        positive(
            "checkpoint_seconds",
            self.checkpoint_seconds,
            1.0,
            1e12,
            "seconds",
        )
    }
}

fn replay(job: &Job<'_>, cluster: &ClusterSpec, policy: Policy, choices: &[usize]) -> PolicyResult {
    let options = job.options;
    let mut result = PolicyResult {
        job: job.trace.name.clone(),
        policy,
        time: 0.0,
        cost: 0.0,
        gpu_hours: 0.0,
        switches: 0,
        preemptions: 0,
        last_batch: 0,
    };
    let pay = |result: &mut PolicyResult, seconds: f64, setting: &Setting| {
        result.time += seconds;
        result.cost += seconds * setting.price / 3600.0;
        result.gpu_hours += seconds * f64::from(setting.gpus) / 3600.0;
    };
    // Every policy meets the same preemptions: they depend on seed, group and time only.
    let mut spots: Vec<Spot> = (0..cluster.groups.len())
        .map(|group| Spot::new(options, group))
        .collect();
    let mut before: Option<&Setting> = None;
    for (part, &choice) in choices.iter().enumerate() {
        let setting = &job.settings[choice];
        if before.is_some_and(|before| !before.same_gpus(setting)) {
            result.switches += 1;
            pay(&mut result, options.restart_seconds, setting);
        }
        let mut left = job.seconds(part, setting);
        if cluster.groups[setting.group].spot {
            // What is lost and the restart lengthen the part, and may meet the next preemption.
            let spot = &mut spots[setting.group];
            spot.skip_to(result.time);
            while result.time + left > spot.next {
                let done = spot.next - result.time;
                pay(&mut result, done + options.restart_seconds, setting);
                left -= done - done.min(options.checkpoint_seconds / 2.0);
                result.preemptions += 1;
                spot.skip_to(result.time);
            }
        }
        pay(&mut result, left, setting);
        result.last_batch = setting.batch;
        before = Some(setting);
    }
    result
}

/// Times at which a spot group is taken away: exponentially distributed gaps.
#[derive(Debug)]
struct Spot {
    state: u64,
    mean: f64,
    next: f64,
}

impl Spot {
    fn new(options: &SimulationOptions, group: usize) -> Self {
        let mut spot = Self {
            // Scrambled, because states that differ by a multiple of the increment below give shifted copies of one stream.
            state: options.seed ^ scramble(group as u64),
            // A job that is preempted faster than it restarts and gets back to its checkpoint would never end.
            mean: options
                .preemption_seconds
                .max(2.0 * (options.restart_seconds + options.checkpoint_seconds)),
            next: 0.0,
        };
        spot.advance();
        spot
    }

    /// The first preemption after `time`.
    fn skip_to(&mut self, time: f64) {
        while self.next <= time {
            self.advance();
        }
    }

    /// A step of `SplitMix64`, then the inverse of the exponential distribution.
    fn advance(&mut self) {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let unit = (scramble(self.state) >> 11) as f64 / (1_u64 << 53) as f64;
        self.next += self.mean * -(1.0 - unit).ln().min(-1e-9);
    }
}

/// The output function of `SplitMix64`, a bijection (Steele et al. 2014).
const fn scramble(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// One line per job and policy.
impl fmt::Display for SimulationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<12} {:<12} {:>12} {:>12} {:>10} {:>9} {:>12} {:>10}",
            "job", "policy", "time s", "cost", "GPU hours", "switches", "preemptions", "last batch"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:<12} {:<12} {:>12.1} {:>12.4} {:>10.3} {:>9} {:>12} {:>10}",
                row.job,
                row.policy.name(),
                row.time,
                row.cost,
                row.gpu_hours,
                row.switches,
                row.preemptions,
                row.last_batch
            )?;
        }
        Ok(())
    }
}
