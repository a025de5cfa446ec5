//! What each policy chooses for each part of a job.

use serde::{Deserialize, Serialize};

use super::{Job, Setting};
use crate::error::Result;
use crate::pareto::Objective;
use crate::trajectory::sequences;

/// Who decides about batch and GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The base batch on the most GPUs that it fills in the first node group.
    Fixed,
    /// The same GPUs; the batch keeps the similarity of the gradients of two halves at the target (Simi-Grad, Qin et al. 2021).
    SimiGrad,
    /// The batch as before; GPUs of least time times money for that batch (after JABAS's automatic scaling).
    Jabas,
    /// Batch and GPUs of greatest goodput, progress per second, at no less than half the goodput per GPU of the best
    /// (after Pollux, Qiao et al. 2021).
    Pollux,
    /// The knee of the front of all sequences of batch and GPUs over job time and money, changes counted (HPMD).
    Hpmd,
}

impl Policy {
    /// All, in the order of the table.
    pub const ALL: [Self; 5] = [
        Self::Fixed,
        Self::SimiGrad,
        Self::Jabas,
        Self::Pollux,
        Self::Hpmd,
    ];

    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::SimiGrad => "simigrad",
            Self::Jabas => "jabas-like",
            Self::Pollux => "pollux-like",
            Self::Hpmd => "hpmd",
        }
    }

    /// Indices into [`Job::settings`], one per part of the job.
    pub(super) fn choose(self, job: &Job<'_>) -> Result<Vec<usize>> {
        let parts = 0..job.parts();
        Ok(match self {
            Self::Fixed => {
                let fixed = fixed(job);
                parts.map(|_| fixed).collect()
            }
            Self::SimiGrad => {
                let gpus = job.settings[fixed(job)];
                let same = |s: &Setting| (s.group, s.gpus) == (gpus.group, gpus.gpus);
                let mut batch = job.trace.base_batch();
                parts
                    .map(|part| {
                        batch = similarity_batch(job, part, batch);
                        best(job, |s| same(s) && s.batch <= batch, |s| -(s.batch as f64))
                    })
                    .collect()
            }
            Self::Jabas => {
                let mut batch = job.trace.base_batch();
                parts
                    .map(|part| {
                        batch = similarity_batch(job, part, batch);
                        best(
                            job,
                            |s| s.batch == batch,
                            |s| s.step_time * s.step_time * s.price,
                        )
                    })
                    .collect()
            }
            Self::Pollux => parts.map(|part| pollux(job, part)).collect(),
            Self::Hpmd => hpmd(job)?,
        })
    }
}

/// The base batch on the most GPUs of the first group that have a setting for it.
fn fixed(job: &Job<'_>) -> usize {
    let base = job.trace.base_batch();
    let first = job
        .settings
        .iter()
        .filter(|s| s.batch == base)
        .map(|s| s.group)
        .min();
    best(
        job,
        |s| s.batch == base && Some(s.group) == first,
        |s| -f64::from(s.gpus),
    )
}

/// Of the settings that `allowed` lets through, or of all if it lets none, the first of least `score`.
fn best(
    job: &Job<'_>,
    allowed: impl Fn(&Setting) -> bool,
    score: impl Fn(&Setting) -> f64,
) -> usize {
    let least = |any: bool| {
        job.settings
            .iter()
            .enumerate()
            .filter(|(_, setting)| any || allowed(setting))
            .min_by(|a, b| score(a.1).total_cmp(&score(b.1)))
            .map(|(index, _)| index)
    };
    least(false).or_else(|| least(true)).unwrap_or(0)
}

/// The batch at which the gradients of its two halves have the target cosine similarity.
///
/// With squared norm g of the mean gradient and variance v at the base batch, halves of a batch B have the similarity
/// `g / (g + 2 v base / B)`; of the batches measured, the smallest that reaches the target.
fn similarity_batch(job: &Job<'_>, part: usize, now: u64) -> u64 {
    let base = job.trace.base_batch() as f64;
    let noise = job
        .trace
        .progress
        .get(&now)
        .map_or(0.0, |progress| progress.noise(job.bounds(part).0));
    let target = job.options.similarity;
    let wanted = 2.0 * noise * base * target / (1.0 - target);
    let available = || job.settings.iter().map(|setting| setting.batch);
    available()
        .filter(|&batch| batch as f64 >= wanted)
        .min()
        .or_else(|| available().max())
        .unwrap_or(now)
}

/// The knee of the front of all sequences.
///
/// Changing the batch alone costs nothing, so on given GPUs every part runs its best batch.
fn hpmd(job: &Job<'_>) -> Result<Vec<usize>> {
    let mut places: Vec<(usize, u32)> = job.settings.iter().map(|s| (s.group, s.gpus)).collect();
    places.dedup();
    let chosen: Vec<Vec<usize>> = (0..job.parts())
        .map(|part| {
            let seconds = |s: &Setting| job.seconds(part, s);
            places
                .iter()
                .map(|&place| best(job, |s| (s.group, s.gpus) == place, seconds))
                .collect()
        })
        .collect();
    let stay: Vec<Vec<(f64, f64)>> = chosen
        .iter()
        .enumerate()
        .map(|(part, settings)| {
            let of = |&index: &usize| {
                let seconds = job.seconds(part, &job.settings[index]);
                (seconds, seconds * job.settings[index].price / 3600.0)
            };
            settings.iter().map(of).collect()
        })
        .collect();
    let front = sequences(&stay, |part, a, b| {
        let seconds = if a == b {
            0.0
        } else {
            job.options.restart_seconds
        };
        let price = job.settings[chosen[part + 1][b]].price;
        ((seconds, seconds * price / 3600.0), a != b)
    })?;
    let choice = front.select(Objective::Knee)?;
    let path = choice.point.payload.choices.iter().zip(&chosen);
    Ok(path
        .map(|(&place, settings)| settings[place as usize])
        .collect())
}

fn pollux(job: &Job<'_>, part: usize) -> usize {
    let goodput = |setting: &Setting| 1.0 / job.seconds(part, setting);
    let per_gpu = |setting: &Setting| goodput(setting) / f64::from(setting.gpus);
    let most = job.settings.iter().map(per_gpu).fold(0.0, f64::max);
    best(job, |s| per_gpu(s) >= 0.5 * most, |s| -goodput(s))
}
