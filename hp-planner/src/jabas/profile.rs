//! The folder, and the times it predicts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::document::{one_line, text};
use crate::error::{Error, Place, Result};

/// Most GPUs of a server.
const MOST_GPUS: u32 = 256;

/// A server: its GPUs and links.
#[derive(Debug, Clone, PartialEq)]
pub struct Server {
    /// Host name, as in the folder.
    pub name: String,
    /// GPU type.
    pub gpu: String,
    /// Number of GPUs.
    pub gpus: u32,
    /// Bytes per second between GPUs of the server.
    pub intra: f64,
    /// Bytes per second between servers.
    pub inter: f64,
}

/// Everything that JABAS's profiler measured.
#[derive(Debug, Clone, PartialEq)]
pub struct JabasProfile {
    /// Servers in the order of their names.
    pub servers: Vec<Server>,
    /// Bucket sizes in MiB, in the order in which they are reduced.
    buckets: Vec<f64>,
    /// Milliseconds of an all-reduce over its ideal milliseconds, inside a server and between.
    intra: Line,
    inter: Line,
    /// By local batch and server.
    computation: BTreeMap<(u32, usize), Computation>,
}

/// `y = slope * x + offset`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Line {
    slope: f64,
    offset: f64,
}

/// What is known of one server at one local batch; times in seconds.
#[derive(Debug, Clone, PartialEq)]
struct Computation {
    local_batch: u32,
    most_workers: u32,
    update: f64,
    copy_per_worker: f64,
    norm_sync: f64,
    forward_share: f64,
    /// Samples per second of one virtual worker.
    base: f64,
    /// Relative throughput of n virtual workers, by the fit if there are three or more points.
    relative: Relative,
    data: BTreeMap<u32, f64>,
}

#[derive(Debug, Clone, PartialEq)]
enum Relative {
    /// `slope * ln n + offset`.
    Logarithmic(Line),
    Measured(Vec<f64>),
}

#[derive(Debug, Deserialize)]
struct ConfigFile {
    memory_profile_dir: PathBuf,
    comp_profile_dir: PathBuf,
    comm_profile_dir: PathBuf,
    bucket_profile_dir: PathBuf,
    gpu_cluster_info: PathBuf,
    #[serde(default)]
    available_servers: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct ServerFile {
    #[serde(rename = "type")]
    gpu: String,
    number: u32,
    intra_network_bandwidth: f64,
    inter_network_bandwidth: f64,
}

#[derive(Debug, Deserialize)]
struct ComputationFile {
    lbs: u32,
    num_models: u32,
    data_time: f64,
    fwd_time: f64,
    bwd_time: f64,
    update_time: f64,
    copy_time: f64,
    #[serde(default)]
    bn_sync_time: f64,
}

#[derive(Debug, Deserialize)]
struct MemoryFile {
    max_num_models: u32,
}

#[derive(Debug, Deserialize)]
struct BucketFile {
    bucket_size_distribution: Vec<f64>,
}

impl JabasProfile {
    /// Reads the folder: `config.json`, and beside it what that names (only the last part of each path counts, so the
    /// folder can lie anywhere).
    ///
    /// # Errors
    /// [`Error::File`] or [`Error::Syntax`] naming the file, [`Error::Field`] naming a value that is not allowed,
    /// [`Error::Data`] if a curve has fewer than two points.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let config: ConfigFile = json(&dir.join("config.json"))?;
        let part = |path: &Path| {
            path.file_name()
                .map_or_else(|| dir.to_owned(), |name| dir.join(name))
        };
        let infos: BTreeMap<String, ServerFile> = json(&part(&config.gpu_cluster_info))?;
        let mut servers = Vec::new();
        for (name, info) in infos {
            if !config.available_servers.is_empty() && !config.available_servers.contains(&name) {
                continue;
            }
            for (field, value) in [
                ("number", f64::from(info.number)),
                ("intra_network_bandwidth", info.intra_network_bandwidth),
                ("inter_network_bandwidth", info.inter_network_bandwidth),
            ] {
                positive(
                    &part(&config.gpu_cluster_info),
                    &format!("{name}.{field}"),
                    value,
                )?;
            }
            checked(
                &part(&config.gpu_cluster_info),
                &format!("{name}.number"),
                f64::from(info.number),
                info.number <= MOST_GPUS,
                &format!("1 to {MOST_GPUS} GPUs of a server"),
            )?;
            servers.push(Server {
                name,
                gpu: info.gpu,
                gpus: info.number,
                intra: info.intra_network_bandwidth,
                inter: info.inter_network_bandwidth,
            });
        }
        if servers.is_empty() {
            let file = part(&config.gpu_cluster_info);
            return Err(missing(
                &format!("available_servers in {}", file.display()),
                1,
                0,
            ));
        }
        let bucket_dir = part(&config.bucket_profile_dir);
        let last = entries(&bucket_dir)?
            .pop()
            .ok_or_else(|| missing("bucket profiles", 1, 0))?;
        let buckets: BucketFile = json(&last)?;
        for size in &buckets.bucket_size_distribution {
            positive(&last, "bucket_size_distribution", *size)?;
        }
        if buckets.bucket_size_distribution.is_empty() {
            return Err(missing("buckets", 1, 0));
        }
        let (mut intra, mut inter) = (None, None);
        for path in entries(&part(&config.comm_profile_dir))? {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let line = fit(&curve(&path)?, &format!("the curve {}", path.display()))?;
            if name.contains("intra") {
                intra = Some(line);
            } else if name.contains("inter") {
                inter = Some(line);
            }
        }
        let mut computation = BTreeMap::new();
        for size_dir in entries(&part(&config.comp_profile_dir))? {
            let name = size_dir.file_name().unwrap_or_default().to_owned();
            for (index, server) in servers.iter().enumerate() {
                let runs = size_dir.join(&server.name);
                if !runs.is_dir() {
                    continue;
                }
                let memory = part(&config.memory_profile_dir)
                    .join(&name)
                    .join(&server.name)
                    .join("max_memory_profile_info.json");
                let memory: MemoryFile = json(&memory)?;
                let one = Computation::read(&runs, memory.max_num_models)?;
                computation.insert((one.local_batch, index), one);
            }
        }
        Ok(Self {
            servers,
            buckets: buckets.bucket_size_distribution,
            intra: intra.ok_or_else(|| missing("all-reduce curves inside a server", 1, 0))?,
            inter: inter.ok_or_else(|| missing("all-reduce curves between servers", 1, 0))?,
            computation,
        })
    }

    /// Local batches that some server was profiled with, ascending.
    pub fn local_batches(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = self.computation.keys().map(|key| key.0).collect();
        sizes.dedup();
        sizes
    }

    /// Most virtual workers per GPU of a server that fit into memory at a local batch; 0 if that was not profiled.
    pub fn most_workers(&self, local_batch: u32, server: usize) -> u32 {
        self.computation
            .get(&(local_batch, server))
            .map_or(0, |known| known.most_workers)
    }

    /// Seconds of an iteration on a GPU of `server` that runs `workers` virtual workers for `rounds` rounds of local
    /// batches, in a job of `gpus` GPUs on one server or on several; `None` if the profile does not cover it.
    ///
    /// JABAS's model with overlapped weight synchronisation: data loading and norm synchronisation; `rounds - 1` whole
    /// rounds; the last one with the all-reduce of all buckets but the last behind the backward pass, then that of the
    /// last; update and copies to the other virtual workers for the share of the last bucket. It rounds the base
    /// throughput to 1/100 sample/s, the relative one to 1/1000 and the pass to 0.1 ms, and so does this.
    pub fn iteration_time(
        &self,
        local_batch: u32,
        server: usize,
        workers: u32,
        rounds: u32,
        gpus: u32,
        several: bool,
    ) -> Option<f64> {
        let known = self.computation.get(&(local_batch, server))?;
        if workers == 0 || rounds == 0 || gpus == 0 || workers > known.most_workers {
            return None;
        }
        let place = &self.servers[server];
        let (bandwidth, line) = if several {
            (place.inter, self.inter)
        } else {
            (place.intra, self.intra)
        };
        let reduce = |mib: &f64| {
            let share = mib * 1024.0 * 1024.0 / f64::from(gpus);
            let ideal = share * 4.0 * f64::from(gpus - 1) / bandwidth * 1000.0;
            line.at(ideal) / 1000.0
        };
        let (last, others) = self.buckets.split_last()?;
        let behind: f64 = others.iter().map(reduce).sum();
        let last_share = last / self.buckets.iter().sum::<f64>();
        let pass = known.pass(workers)?;
        let forward = pass * known.forward_share;
        let backward = pass * (1.0 - known.forward_share);
        let data = known
            .data
            .get(&workers)
            .copied()
            .or_else(|| known.data.get(&1).map(|one| one * f64::from(workers)))?;
        let finish = known.update + known.copy_per_worker * f64::from(workers - 1);
        Some(
            data + known.norm_sync * f64::from(workers)
                + (data + forward + backward) * f64::from(rounds - 1)
                + forward
                + backward.max(behind)
                + reduce(last)
                + finish * last_share,
        )
    }
}

impl Computation {
    fn read(dir: &Path, most_workers: u32) -> Result<Self> {
        let mut runs: Vec<(PathBuf, ComputationFile)> = Vec::new();
        for path in entries(dir)? {
            let run: ComputationFile = json(&path)?;
            for (field, value) in [
                ("lbs", f64::from(run.lbs)),
                ("num_models", f64::from(run.num_models)),
                ("fwd_time", run.fwd_time),
                ("bwd_time", run.bwd_time),
            ] {
                positive(&path, field, value)?;
            }
            for (field, value) in [
                ("data_time", run.data_time),
                ("update_time", run.update_time),
                ("copy_time", run.copy_time),
                ("bn_sync_time", run.bn_sync_time),
            ] {
                checked(&path, field, value, value >= 0.0, "0 or more")?;
            }
            runs.push((path, run));
        }
        runs.sort_by_key(|(_, run)| run.num_models);
        let Some((_, most)) = runs.last() else {
            return Err(missing("computation profiles", 1, 0));
        };
        let pass = |run: &ComputationFile| (run.fwd_time + run.bwd_time) / 1000.0;
        let throughput =
            |run: &ComputationFile| f64::from(run.lbs) * f64::from(run.num_models) / pass(run);
        let base = rounded(throughput(&runs[0].1), 100.0);
        let points: Vec<(f64, f64)> = runs
            .iter()
            .map(|(_, run)| {
                (
                    f64::from(run.num_models).ln(),
                    rounded(throughput(run) / base, 1000.0),
                )
            })
            .collect();
        let relative = if most.num_models < 3 {
            Relative::Measured(points.iter().map(|point| point.1).collect())
        } else {
            Relative::Logarithmic(fit(&points, "virtual workers' throughput")?)
        };
        let copies = most.num_models.saturating_sub(1);
        Ok(Self {
            local_batch: most.lbs,
            most_workers,
            update: most.update_time / 1000.0,
            copy_per_worker: if copies > 0 {
                most.copy_time / f64::from(copies) / 1000.0
            } else {
                0.0
            },
            norm_sync: most.bn_sync_time / 1000.0,
            forward_share: most.fwd_time / (most.fwd_time + most.bwd_time),
            base,
            relative,
            data: runs
                .iter()
                .map(|(_, run)| (run.num_models, run.data_time / 1000.0))
                .collect(),
        })
    }

    /// Seconds of forward and backward pass of `workers` virtual workers together.
    fn pass(&self, workers: u32) -> Option<f64> {
        let relative = match &self.relative {
            Relative::Logarithmic(line) => line.at(f64::from(workers).ln()),
            Relative::Measured(points) => *points.get(workers as usize - 1)?,
        };
        Some(rounded(
            f64::from(self.local_batch) * f64::from(workers) / (relative * self.base),
            10_000.0,
        ))
    }
}

impl Line {
    fn at(self, x: f64) -> f64 {
        self.slope * x + self.offset
    }
}

fn rounded(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

/// Least squares.
fn fit(points: &[(f64, f64)], what: &str) -> Result<Line> {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    if points.len() < 2 || spread <= 0.0 {
        return Err(missing(what, 2, points.len()));
    }
    let slope = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>() / spread;
    Ok(Line {
        slope,
        offset: y - slope * x,
    })
}

fn curve(path: &Path) -> Result<Vec<(f64, f64)>> {
    let text = text(path)?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            let mut numbers = line
                .split(',')
                .map(|part| part.trim().parse::<f64>().ok().filter(|x| x.is_finite()));
            match (numbers.next().flatten(), numbers.next().flatten()) {
                (Some(x), Some(y)) => Ok((x, y)),
                _ => Err(Error::Syntax {
                    place: Place {
                        path: Some(path.to_owned()),
                        line: Some(index + 1),
                    },
                    message: format!("expected two numbers separated by a comma, got {line:?}"),
                }),
            }
        })
        .collect()
}

fn json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_str(&text(path)?).map_err(|error| Error::Syntax {
        place: Place {
            path: Some(path.to_owned()),
            line: Some(error.line()),
        },
        message: one_line(&error.to_string()),
    })
}

/// What a folder holds, in the order of the names.
fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let file = |error: std::io::Error| Error::File {
        path: dir.to_owned(),
        message: error.to_string(),
    };
    let mut paths = fs::read_dir(dir)
        .map_err(file)?
        .map(|entry| entry.map(|entry| entry.path()).map_err(file))
        .collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn positive(path: &Path, field: &str, value: f64) -> Result<()> {
    checked(path, field, value, value > 0.0, "a number above 0")
}

/// An error that names the field unless its value is finite and `fine`.
fn checked(path: &Path, field: &str, value: f64, fine: bool, allowed: &str) -> Result<()> {
    if value.is_finite() && fine {
        Ok(())
    } else {
        Err(Error::Field {
            place: Place {
                path: Some(path.to_owned()),
                line: None,
            },
            field: field.to_owned(),
            value: value.to_string(),
            allowed: allowed.to_owned(),
        })
    }
}

fn missing(what: &str, need: usize, have: usize) -> Error {
    Error::Data {
        what: what.to_owned(),
        need,
        have,
    }
}
