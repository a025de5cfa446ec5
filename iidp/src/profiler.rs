//! Measures what steps and collectives take here, fits a small model to it, and writes both down.
//!
//! A step of one rank with local batch b, v virtual workers and a accumulation steps is modelled as
//!
//! ```text
//! t(b, v, a) = fixed_v + a (per_micro_batch_v + per_sample_v b)
//! ```
//!
//! with three coefficients per v: the update and the hand-over of work, what a micro-batch costs whatever its size, and what a
//! sample costs. An all-reduce of n bytes is `latency + n / bandwidth`. Both are least-squares fits of relative errors to medians.

use std::io::Write;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::communicator::Communicator;
use crate::{Error, Executor, ExecutorConfig, WorkerLayout, Workload};

/// How often things are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profiler {
    warmup: usize,
    repeats: usize,
}

impl Default for Profiler {
    fn default() -> Self {
        Self {
            warmup: 2,
            repeats: 7,
        }
    }
}

/// A measured step of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepSample {
    /// What the rank did.
    pub layout: WorkerLayout,
    /// Median time of a step in seconds.
    pub seconds: f64,
    /// Largest resident memory of the process during the steps, in bytes; 0 where the system does not tell.
    pub peak_bytes: u64,
}

/// A measured all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AllReduceSample {
    /// Ranks that took part.
    pub ranks: usize,
    /// Size of the buffer.
    pub bytes: usize,
    /// Median time in seconds.
    pub seconds: f64,
}

/// Coefficients of the step time for one number of virtual workers, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepModel {
    /// The number of virtual workers.
    pub virtual_workers: usize,
    /// Per step.
    pub fixed: f64,
    /// Per micro-batch that a worker computes.
    pub per_micro_batch: f64,
    /// Per sample that a worker computes.
    pub per_sample: f64,
}

/// What was measured on this machine, and what follows from it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepProfile {
    /// Measured steps.
    pub steps: Vec<StepSample>,
    /// Measured all-reduces.
    pub all_reduces: Vec<AllReduceSample>,
    /// One model per number of virtual workers that was measured often enough.
    pub models: Vec<StepModel>,
}

impl Profiler {
    /// Measures medians of `repeats` steps after `warmup` steps that do not count.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for no repeats.
    pub fn new(warmup: usize, repeats: usize) -> Result<Self, Error> {
        if repeats == 0 {
            return Err(Error::Invalid {
                what: "profiler repeats",
                problem: "got 0, expected at least 1".to_owned(),
            });
        }
        Ok(Self { warmup, repeats })
    }

    /// Measures steps of one rank under each of `layouts` and fits the model. `samples` are used over and over; the learning
    /// rate is zero and the model is thrown away. To tell the coefficients of a number of workers apart, give it at least
    /// three layouts, with two local batches and two numbers of accumulation steps among them.
    ///
    /// # Errors
    ///
    /// Those of [`ExecutorConfig::init`] and [`Executor::step`]; [`Error::EmptyBatch`] without samples.
    pub fn steps<W: Workload>(
        &self,
        workload: W,
        configure: impl FnOnce(ExecutorConfig) -> ExecutorConfig,
        samples: &[u64],
        layouts: &[WorkerLayout],
    ) -> Result<StepProfile, Error> {
        let first = *layouts.first().ok_or(Error::NoDevices)?;
        let mut executor = configure(ExecutorConfig::new(vec![first])).init(workload)?;
        let mut measured = Vec::with_capacity(layouts.len());
        for layout in layouts {
            executor.reassign(vec![*layout])?;
            measured.push(self.step(&mut executor, samples, *layout)?);
        }
        Ok(StepProfile {
            models: fit_steps(&measured),
            steps: measured,
            all_reduces: Vec::new(),
        })
    }

    /// Measures the step of a one-rank executor.
    fn step<W: Workload>(
        &self,
        executor: &mut Executor<W>,
        samples: &[u64],
        layout: WorkerLayout,
    ) -> Result<StepSample, Error> {
        if samples.is_empty() {
            return Err(Error::EmptyBatch);
        }
        let batch: Vec<u64> = samples
            .iter()
            .copied()
            .cycle()
            .take(layout.samples())
            .collect();
        for _ in 0..self.warmup {
            executor.step(&batch, 0.0)?;
        }
        let memory = PeakMemory::start();
        let mut times = Vec::with_capacity(self.repeats);
        for _ in 0..self.repeats {
            times.push(executor.step(&batch, 0.0)?.timings.total.as_secs_f64());
        }
        Ok(StepSample {
            layout,
            seconds: median(times),
            peak_bytes: memory.bytes(),
        })
    }

    /// Measures all-reduces of `bytes` on this rank; every rank of the communicator calls it with the same sizes.
    ///
    /// # Errors
    ///
    /// The communicator's.
    pub fn all_reduces(
        &self,
        communicator: &dyn Communicator,
        bytes: &[usize],
    ) -> Result<Vec<AllReduceSample>, Error> {
        let measure = |&bytes: &usize| {
            let mut buffer = vec![1.0f32; bytes.div_ceil(size_of::<f32>())];
            let mut times = Vec::with_capacity(self.repeats);
            for round in 0..self.warmup + self.repeats {
                buffer.fill(1.0);
                communicator.barrier()?;
                let start = Instant::now();
                communicator.all_reduce_sum(&mut buffer)?;
                if round >= self.warmup {
                    times.push(start.elapsed().as_secs_f64());
                }
            }
            Ok(AllReduceSample {
                ranks: communicator.size(),
                bytes,
                seconds: median(times),
            })
        };
        bytes.iter().map(measure).collect()
    }
}

impl StepProfile {
    /// Predicted seconds of a rank's step under `layout`, or `None` if its number of virtual workers was not profiled.
    pub fn step_seconds(&self, layout: WorkerLayout) -> Option<f64> {
        let model = self
            .models
            .iter()
            .find(|model| model.virtual_workers == layout.virtual_workers)?;
        let per_round = model
            .per_sample
            .mul_add(layout.local_batch as f64, model.per_micro_batch);
        Some(per_round.mul_add(layout.accumulation_steps as f64, model.fixed))
    }

    /// Predicted seconds of an all-reduce of `bytes`, from those measured; `None` with fewer than two sizes.
    pub fn all_reduce_seconds(&self, bytes: usize) -> Option<f64> {
        let rows: Vec<_> = self
            .all_reduces
            .iter()
            .map(|sample| ([1.0, sample.bytes as f64], sample.seconds))
            .collect();
        let [latency, per_byte] = least_squares_of_costs(&rows)?;
        Some(per_byte.mul_add(bytes as f64, latency))
    }

    /// Writes the steps with one virtual worker as the table of end-to-end measurements that hp-planner's `Profile` reads:
    /// CSV with the columns `id, gpu, gpus, dp, tp, pp, mbs, gbs, iter_s, mem_gib` and those of `model` (name and value: `layers`,
    /// `hidden`, `heads`, `vocab`, `seq`).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `device` or the model's texts contain a comma, a quote or a line break, and for failures of `out`.
    pub fn write_planner_rows(
        &self,
        out: &mut dyn Write,
        device: &str,
        model: &[(&str, String)],
    ) -> Result<(), Error> {
        let texts = model
            .iter()
            .flat_map(|(name, value)| [*name, value.as_str()])
            .chain([device]);
        if let Some(text) = texts
            .into_iter()
            .find(|text| text.contains([',', '"', '\n', '\r']))
        {
            return Err(Error::Invalid {
                what: "text of a profile row",
                problem: format!("{text:?} contains a comma, a quote or a line break"),
            });
        }
        let mut table = String::from("id,gpu,gpus,dp,tp,pp,mbs,gbs,iter_s,mem_gib,precision");
        for (name, _) in model {
            table.push(',');
            table.push_str(name);
        }
        table.push('\n');
        for sample in self
            .steps
            .iter()
            .filter(|sample| sample.layout.virtual_workers == 1)
        {
            let WorkerLayout {
                local_batch,
                accumulation_steps,
                ..
            } = sample.layout;
            let memory = match sample.peak_bytes {
                0 => String::new(),
                bytes => format!("{:.6}", bytes as f64 / f64::from(1u32 << 30)),
            };
            let (samples, seconds) = (sample.layout.samples(), sample.seconds);
            let row = format!(
                "b{local_batch}-a{accumulation_steps},{device},1,1,1,1,{local_batch},{samples},{seconds:.9},{memory},fp32"
            );
            let values = model.iter().map(|(_, value)| value.clone());
            let cells: Vec<String> = std::iter::once(row).chain(values).collect();
            table.push_str(&cells.join(","));
            table.push('\n');
        }
        out.write_all(table.as_bytes())
            .map_err(|error| Error::Invalid {
                what: "profile output",
                problem: error.to_string(),
            })
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

fn fit_steps(samples: &[StepSample]) -> Vec<StepModel> {
    let mut workers: Vec<usize> = samples
        .iter()
        .map(|sample| sample.layout.virtual_workers)
        .collect();
    workers.sort_unstable();
    workers.dedup();
    let fit = |virtual_workers: usize| {
        let rows: Vec<_> = samples
            .iter()
            .filter(|sample| sample.layout.virtual_workers == virtual_workers)
            .map(|sample| {
                let steps = sample.layout.accumulation_steps as f64;
                (
                    [1.0, steps, steps * sample.layout.local_batch as f64],
                    sample.seconds,
                )
            })
            .collect();
        let [fixed, per_micro_batch, per_sample] = least_squares_of_costs(&rows)?;
        Some(StepModel {
            virtual_workers,
            fixed,
            per_micro_batch,
            per_sample,
        })
    };
    workers.into_iter().filter_map(fit).collect()
}

/// [`least_squares`] among coefficients that are not negative, as costs are: noise is not explained by a negative cost. With the
/// few columns that there are, every set of coefficients that stay zero is tried.
fn least_squares_of_costs<const N: usize>(rows: &[([f64; N], f64)]) -> Option<[f64; N]> {
    // Whether the rows tell the coefficients apart at all.
    least_squares(rows, [true; N])?;
    let deviation = |x: &[f64; N]| -> f64 {
        let relative = |(a, t): &([f64; N], f64)| {
            let predicted: f64 = a.iter().zip(x).map(|(a, x)| a * x).sum();
            (predicted / t - 1.0).powi(2)
        };
        rows.iter().map(relative).sum()
    };
    (1usize..1 << N)
        .filter_map(|set| least_squares(rows, std::array::from_fn(|i| (set >> i) & 1 == 1)))
        .filter(|x| x.iter().all(|x| *x >= 0.0))
        .min_by(|a, b| deviation(a).total_cmp(&deviation(b)))
}

/// The x that minimises the sum over rows (a, t) of `((a x - t) / t)^2`, by the normal equations, with zero for what is not `kept`; `None` if
/// they are singular.
fn least_squares<const N: usize>(rows: &[([f64; N], f64)], kept: [bool; N]) -> Option<[f64; N]> {
    // Columns differ by many orders of magnitude: scaled to a largest entry of one, the equations stay well conditioned.
    let scale: [f64; N] =
        std::array::from_fn(|i| rows.iter().map(|(a, _)| a[i].abs()).fold(0.0, f64::max));
    if rows.len() < N || scale.contains(&0.0) {
        return None;
    }
    let mut matrix = [[0.0; N]; N];
    let mut right = [0.0; N];
    for (a, t) in rows {
        let row: [f64; N] =
            std::array::from_fn(|i| if kept[i] { a[i] / scale[i] / t } else { 0.0 });
        for i in 0..N {
            right[i] += row[i];
            for j in 0..N {
                matrix[i][j] += row[i] * row[j];
            }
        }
    }
    for i in (0..N).filter(|i| !kept[*i]) {
        matrix[i][i] = 1.0;
    }
    for pivot in 0..N {
        let largest = (pivot..N)
            .max_by(|a, b| matrix[*a][pivot].abs().total_cmp(&matrix[*b][pivot].abs()))?;
        matrix.swap(pivot, largest);
        right.swap(pivot, largest);
        if matrix[pivot][pivot].abs() < 1e-12 * matrix[0][0].abs() {
            return None;
        }
        for i in pivot + 1..N {
            let factor = matrix[i][pivot] / matrix[pivot][pivot];
            let row = matrix[pivot];
            for (x, y) in matrix[i].iter_mut().zip(row).skip(pivot) {
                *x -= factor * y;
            }
            right[i] -= factor * right[pivot];
        }
    }
    let mut solution = [0.0; N];
    for i in (0..N).rev() {
        let known: f64 = (i + 1..N).map(|j| matrix[i][j] * solution[j]).sum();
        solution[i] = (right[i] - known) / matrix[i][i];
    }
    Some(std::array::from_fn(|i| solution[i] / scale[i]))
}

/// The process's largest resident memory since the start of the measurement (Linux).
struct PeakMemory;

impl PeakMemory {
    fn start() -> Self {
        // Writing 5 resets the high-water mark; where that is not possible the mark covers the process's life.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        Self
    }

    #[expect(
        clippy::unused_self,
        reason = "the mark belongs to the measurement that was started"
    )]
    fn bytes(&self) -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = status.lines().find_map(|line| {
            line.strip_prefix("VmHWM:")?
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        });
        kib.unwrap_or(0u64) * 1024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(b: usize, v: usize, a: usize, seconds: f64) -> StepSample {
        StepSample {
            layout: WorkerLayout::new(b, v, a),
            seconds,
            peak_bytes: 0,
        }
    }

    #[test]
    fn the_fit_finds_the_coefficients_of_exact_times() {
        let time = |b: usize, a: usize| 0.002 + a as f64 * (0.0005 + 0.0003 * b as f64);
        let steps: Vec<_> = [(1, 1), (4, 1), (4, 3), (8, 2)]
            .map(|(b, a)| sample(b, 2, a, time(b, a)))
            .to_vec();
        let profile = StepProfile {
            models: fit_steps(&steps),
            steps,
            all_reduces: Vec::new(),
        };
        let predicted = profile.step_seconds(WorkerLayout::new(16, 2, 5)).unwrap();
        assert!((predicted - time(16, 5)).abs() < 1e-9, "{predicted}");
        assert_eq!(
            profile.step_seconds(WorkerLayout::new(16, 3, 5)),
            None,
            "three workers were not profiled"
        );
    }

    #[test]
    fn noise_is_not_taken_for_a_negative_cost() {
        // A step with three accumulation steps that was measured too fast.
        let steps = [
            sample(1, 1, 1, 0.003),
            sample(4, 1, 1, 0.012),
            sample(16, 1, 1, 0.050),
            sample(4, 1, 3, 0.020),
        ];
        let [model] = fit_steps(&steps)[..] else {
            panic!("one number of workers")
        };
        assert!(model.fixed >= 0.0 && model.per_micro_batch >= 0.0 && model.per_sample > 0.0);
        let free: Vec<_> = steps
            .iter()
            .map(|step| {
                let a = step.layout.accumulation_steps as f64;
                ([1.0, a, a * step.layout.local_batch as f64], step.seconds)
            })
            .collect();
        assert!(
            least_squares(&free, [true; 3])
                .unwrap()
                .iter()
                .any(|x| *x < 0.0)
        );
    }

    #[test]
    fn too_few_or_equal_layouts_give_no_model() {
        assert!(fit_steps(&[sample(1, 1, 1, 0.1), sample(2, 1, 1, 0.2)]).is_empty());
        assert!(
            fit_steps(&[
                sample(1, 1, 1, 0.1),
                sample(1, 1, 1, 0.1),
                sample(1, 1, 1, 0.1)
            ])
            .is_empty()
        );
    }

    #[test]
    fn all_reduces_are_latency_and_bandwidth() {
        let at = |bytes| AllReduceSample {
            ranks: 2,
            bytes,
            seconds: 1e-5 + bytes as f64 / 4e9,
        };
        let profile = StepProfile {
            all_reduces: [1 << 10, 1 << 16, 1 << 22].map(at).to_vec(),
            ..Default::default()
        };
        let predicted = profile.all_reduce_seconds(1 << 20).unwrap();
        assert!((predicted - at(1 << 20).seconds).abs() < 1e-9);
    }

    #[test]
    fn rows_are_a_table_with_the_planners_columns() {
        let profile = StepProfile {
            steps: vec![sample(4, 1, 2, 0.5), sample(4, 2, 1, 0.25)],
            ..StepProfile::default()
        };
        let mut out = Vec::new();
        profile
            .write_planner_rows(&mut out, "T4", &[("layers", "2".to_owned())])
            .unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "id,gpu,gpus,dp,tp,pp,mbs,gbs,iter_s,mem_gib,precision,layers\n\
             b4-a2,T4,1,1,1,1,4,8,0.500000000,,fp32,2\n"
        );
        let refused = profile
            .write_planner_rows(&mut Vec::new(), "a,b", &[])
            .unwrap_err();
        assert!(refused.to_string().contains("\"a,b\""));
    }
}
