//! Measured traces of a training job: how long steps take where, and how far steps of each batch get.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Place, Result};

/// A job: step times per GPU type, and statistical progress per global batch.
#[derive(Debug, Clone, PartialEq)]
pub struct JobTrace {
    /// Name of its folder.
    pub name: String,
    /// Step times by GPU type, as in the names of the files `placements-TYPE.csv`.
    pub speeds: BTreeMap<String, Speed>,
    /// Progress by global batch, from the files `validation-BATCH.csv`.
    pub progress: BTreeMap<u64, Progress>,
}

/// Step and synchronisation time by number of GPUs and local batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Speed {
    /// For each number of GPUs (on as few nodes as measured): local batch, seconds per step, of these in synchronisation.
    by_gpus: BTreeMap<u32, Vec<(f64, f64, f64)>>,
}

/// What steps of one global batch achieve.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Progress made, steps taken, squared norm of the mean gradient, variance of the gradient.
    points: Vec<(f64, f64, f64, f64)>,
}

impl JobTrace {
    /// Reads one job's folder: `placements-TYPE.csv` with columns placement (a digit of GPUs per node), `local_bsz`,
    /// `step_time`, `sync_time`; `validation-BATCH.csv` with progress, iteration, `grad_sqr`, `grad_var`.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Syntax`] naming file and line, [`Error::Data`] if either kind of file is missing.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let (mut speeds, mut progress) = (BTreeMap::new(), BTreeMap::new());
        for path in files(dir)? {
            let name = path
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if let Some(gpu) = name.strip_prefix("placements-") {
                speeds.insert(gpu.to_owned(), Speed::read(&path)?);
            } else if let Some(batch) = name.strip_prefix("validation-") {
                let batch: u64 = batch
                    .parse::<u64>()
                    .ok()
                    .filter(|&batch| batch > 0)
                    .ok_or_else(|| {
                        syntax(
                            &path,
                            None,
                            format!("expected a batch in the file's name, got {batch:?}"),
                        )
                    })?;
                progress.insert(batch, Progress::read(&path)?);
            }
        }
        for (what, have) in [
            ("placements-TYPE.csv", speeds.len()),
            ("validation-BATCH.csv", progress.len()),
        ] {
            if have == 0 {
                return Err(Error::Data {
                    what: format!("{what} in {}", dir.display()),
                    need: 1,
                    have,
                });
            }
        }
        let name = dir
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Ok(Self {
            name,
            speeds,
            progress,
        })
    }

    /// Reads all jobs below a folder, or the one that it holds itself.
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir).
    pub fn all_from_dir(dir: impl AsRef<Path>) -> Result<Vec<Self>> {
        let dir = dir.as_ref();
        let inside: Vec<PathBuf> = files(dir)?
            .into_iter()
            .filter(|path| path.is_dir())
            .collect();
        if inside.is_empty() {
            return Ok(vec![Self::from_dir(dir)?]);
        }
        inside.iter().map(Self::from_dir).collect()
    }

    /// Progress at which the job is done: the least that all batches reached.
    pub fn goal(&self) -> f64 {
        let reached = self
            .progress
            .values()
            .filter_map(|progress| progress.points.last());
        reached.map(|point| point.0).fold(f64::INFINITY, f64::min)
    }

    /// The smallest global batch, whose steps are the unit of progress.
    pub fn base_batch(&self) -> u64 {
        self.progress.keys().next().copied().unwrap_or(1)
    }
}

/// Batch per GPU, seconds per step, seconds of it in synchronisation.
type Timing = (f64, f64, f64);

impl Speed {
    fn read(path: &Path) -> Result<Self> {
        let mut fewest: BTreeMap<u32, (usize, Vec<Timing>)> = BTreeMap::new();
        for (line, [placement, batch, step, sync]) in
            rows(path, ["placement", "local_bsz", "step_time", "sync_time"])?
        {
            let digits = format!("{placement:.0}");
            let gpus: u32 = digits.chars().filter_map(|digit| digit.to_digit(10)).sum();
            if placement < 0.0
                || placement.fract() != 0.0
                || gpus == 0
                || batch <= 0.0
                || step <= 0.0
                || !(0.0..=step).contains(&sync)
            {
                return Err(syntax(
                    path,
                    Some(line),
                    "expected a digit of GPUs per node, a local batch, a step time and a synchronisation time within it".to_owned(),
                ));
            }
            let known = fewest
                .entry(gpus)
                .or_insert_with(|| (digits.len(), Vec::new()));
            if digits.len() < known.0 {
                *known = (digits.len(), Vec::new());
            }
            if digits.len() == known.0 {
                known.1.push((batch, step, sync));
            }
        }
        let by_gpus = fewest
            .into_iter()
            .map(|(gpus, (_, mut points))| {
                points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
                points.dedup_by(|a, b| a.0.total_cmp(&b.0).is_eq());
                (gpus, points)
            })
            .collect();
        Ok(Self { by_gpus })
    }

    /// Numbers of GPUs that were measured.
    pub fn gpus(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_gpus.keys().copied()
    }

    /// Seconds of a step of `global_batch` samples on `gpus` GPUs; `None` if that number was not measured or there are
    /// fewer samples than GPUs.
    ///
    /// Step times are interpolated over the local batch; beyond the largest measured one gradients are accumulated, and
    /// only the last pass synchronises.
    pub fn step_time(&self, gpus: u32, global_batch: u64) -> Option<f64> {
        let points = self.by_gpus.get(&gpus)?;
        let local = global_batch as f64 / f64::from(gpus);
        let most = points.last()?.0;
        if local < 1.0 {
            return None;
        }
        let passes = (local / most).ceil().max(1.0);
        let (step, sync) = interpolate(points, local / passes);
        Some((passes - 1.0) * (step - sync) + step)
    }
}

impl Progress {
    fn read(path: &Path) -> Result<Self> {
        let mut points = Vec::new();
        for (line, [progress, steps, square, variance]) in
            rows(path, ["progress", "iteration", "grad_sqr", "grad_var"])?
        {
            let last = points
                .last()
                .map_or((0.0, 0.0), |p: &(f64, f64, f64, f64)| (p.0, p.1));
            if progress <= last.0 || steps <= last.1 {
                return Err(syntax(
                    path,
                    Some(line),
                    "progress and iteration must rise".to_owned(),
                ));
            }
            points.push((progress, steps, square, variance));
        }
        if points.is_empty() {
            return Err(Error::Data {
                what: format!("rows in {}", path.display()),
                need: 1,
                have: 0,
            });
        }
        Ok(Self { points })
    }

    fn steps_at(&self, progress: f64) -> f64 {
        let end = self
            .points
            .partition_point(|p| p.0 < progress)
            .min(self.points.len() - 1);
        let before = if end == 0 {
            (0.0, 0.0)
        } else {
            (self.points[end - 1].0, self.points[end - 1].1)
        };
        let after = &self.points[end];
        before.1 + (progress - before.0) / (after.0 - before.0) * (after.1 - before.1)
    }

    /// Steps from one progress to another.
    pub fn steps(&self, from: f64, to: f64) -> f64 {
        self.steps_at(to) - self.steps_at(from)
    }

    /// Variance over squared norm of the gradient at a progress: the noise scale in units of the base batch.
    pub fn noise(&self, progress: f64) -> f64 {
        let at = self
            .points
            .partition_point(|p| p.0 < progress)
            .min(self.points.len() - 1);
        let (_, _, square, variance) = self.points[at];
        variance.max(0.0) / square.max(f64::MIN_POSITIVE)
    }
}

fn interpolate(points: &[(f64, f64, f64)], x: f64) -> (f64, f64) {
    let end = points.partition_point(|p| p.0 < x);
    if end == 0 || end == points.len() {
        let p = points[end.min(points.len() - 1)];
        return (p.1, p.2);
    }
    let (a, b) = (points[end - 1], points[end]);
    let t = (x - a.0) / (b.0 - a.0);
    (a.1 + t * (b.1 - a.1), a.2 + t * (b.2 - a.2))
}

fn syntax(path: &Path, line: Option<usize>, message: String) -> Error {
    Error::Syntax {
        place: Place {
            path: Some(path.to_owned()),
            line,
        },
        message,
    }
}

/// Line number and values of the named columns of a CSV file.
fn rows<const N: usize>(path: &Path, columns: [&str; N]) -> Result<Vec<(usize, [f64; N])>> {
    let text = crate::document::text(path)?;
    let mut lines = text.lines().enumerate();
    let header: Vec<&str> = lines.next().map_or_else(Vec::new, |(_, line)| {
        line.split(',').map(str::trim).collect()
    });
    let mut places = [0; N];
    for (place, column) in places.iter_mut().zip(columns) {
        *place = header
            .iter()
            .position(|name| *name == column)
            .ok_or_else(|| {
                syntax(
                    path,
                    Some(1),
                    format!("expected a column {column}, got {header:?}"),
                )
            })?;
    }
    let mut all = Vec::new();
    for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let mut values = [0.0; N];
        for ((value, &place), column) in values.iter_mut().zip(&places).zip(columns) {
            let cell = cells.get(place).copied().unwrap_or_default();
            *value = cell
                .parse()
                .ok()
                .filter(|x: &f64| x.is_finite())
                .ok_or_else(|| {
                    syntax(
                        path,
                        Some(index + 1),
                        format!("expected a number for {column}, got {cell:?}"),
                    )
                })?;
        }
        all.push((index + 1, values));
    }
    Ok(all)
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let file = |error: std::io::Error| Error::File {
        path: dir.to_owned(),
        message: error.to_string(),
    };
    let mut paths = std::fs::read_dir(dir)
        .map_err(file)?
        .map(|entry| entry.map(|entry| entry.path()).map_err(file))
        .collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}
