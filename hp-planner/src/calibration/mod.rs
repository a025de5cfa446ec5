//! Calibration: the constants of the cost model fitted from end-to-end measurements.
//!
//! Rows are grouped by framework and GPU. For each group several models compete: one utilisation constant that scales the
//! catalogue's prediction; the full set of bounded [`Constants`]; and these with factors for the shapes of work that were measured
//! (see [`crate::cost::shapes`]). Cross-validation inside the training rows decides, so that few rows do not lead to an over-fitted
//! model. Prediction intervals are quantiles of the residuals of the held-out folds.

mod layers;
pub(crate) mod least_squares;
mod memory;

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::cluster::GIB;
use crate::cost::analytic::AnalyticCost;
use crate::cost::constants::{BOUNDS, COUNT, Constants};
use crate::cost::memory::MemoryConstants;
use crate::cost::shapes::{ShapeFactors, ShapeKey, ShapeTable};
use crate::error::{Error, Infeasible, Result};
use crate::profile::{Case, CaseKey, MeasuredRow, Profile};
pub use layers::LayerProfile;
use least_squares::{Unknown, minimise};
pub use memory::MemoryFit;

/// Folds of the cross-validation: more for small groups, which cannot spare much.
const FOLDS: usize = 4;
const FOLDS_OF_FEW: usize = 8;

/// Least held-out error beyond which a row counts by its logarithm when the kinds of fit are compared.
const SCORE_SCALE: f64 = 0.05;

/// Rows up to which families of shapes weigh by their rows.
const LARGE_FAMILY: f64 = 8.0;

/// Rows below which a group is small.
const SMALL: usize = 64;

/// Fewest rows for which the full set of constants is considered.
const FEW: usize = 6;

/// Prior deviations of the logarithms of the factors of a family of shapes and of a single shape that compete.
const SHAPE_DEVIATIONS: [(f64, f64); 3] = [(0.05, 0.02), (0.08, 0.08), (0.15, 0.25)];

/// Greatest logarithm of a shape's factor: kernels of one library differ by less than a factor of 2.
const SHAPE_LIMIT: f64 = std::f64::consts::LN_2;

/// How the constants of a group were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FitKind {
    /// The catalogue's values.
    Catalogue,
    /// One factor on the predicted time.
    Utilisation,
    /// All constants.
    Full,
    /// All constants, and factors for the shapes that were measured.
    Shapes,
    /// All of this, and layer profiles of the shapes that were measured often.
    Layers,
}

/// Constants of one group of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// How they were found.
    pub kind: FitKind,
    /// Rows they were fitted to.
    pub rows: usize,
    /// The constants.
    pub constants: Constants,
    /// Factor on the predicted time.
    pub factor: f64,
    /// Factors of the shapes that were measured.
    pub shapes: ShapeTable,
    /// Layer profiles, sorted by shape.
    pub layers: Vec<LayerProfile>,
    /// Mean absolute logarithmic error of held-out rows.
    pub error: f64,
    /// Logarithms of measured over predicted time between which 90 % of held-out rows lie.
    pub interval: (f64, f64),
}

/// Fitted constants by framework and GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    fits: Vec<(CaseKey, Fit)>,
    memory: BTreeMap<String, MemoryFit>,
}

/// Prediction for one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Seconds per iteration, if the row could be understood.
    pub iteration_time: Option<f64>,
    /// Lower and upper end of the 90 % interval.
    pub interval: Option<(f64, f64)>,
    /// GiB on the fullest device.
    pub memory_gib: Option<f64>,
    /// Why the configuration cannot run or cannot be predicted; `None` if all is well.
    pub reason: Option<Infeasible>,
    /// Whether a layer profile of the shape gave the time, not the formula.
    pub profiled: bool,
}

struct Sample {
    case: Case,
    shape: Option<ShapeKey>,
    seconds: f64,
}

impl Calibration {
    /// The catalogue's constants.
    pub fn catalogue() -> Self {
        Self::default()
    }

    /// Fits to the rows with a measured time or memory; rows that cannot be understood are left out.
    ///
    /// # Errors
    /// [`Error::Data`] if no row can be used.
    pub fn fit(profile: &Profile) -> Result<Self> {
        let rows: Vec<&MeasuredRow> = profile.rows.iter().collect();
        Self::fit_rows(&rows)
    }

    /// As [`fit`](Self::fit), of selected rows.
    ///
    /// # Errors
    /// As [`fit`](Self::fit).
    pub fn fit_rows(rows: &[&MeasuredRow]) -> Result<Self> {
        let mut groups: BTreeMap<CaseKey, Vec<Sample>> = BTreeMap::new();
        for row in rows {
            if let (Some(seconds), Ok(case)) = (row.iteration_time(), row.case())
                && predicted(&case, &AnalyticCost::new()).is_ok()
            {
                groups.entry(case.key.clone()).or_default().push(Sample {
                    shape: shape_of(&case),
                    case,
                    seconds,
                });
            }
        }
        let memory = memory::fit(rows);
        if groups.is_empty() && memory.is_empty() {
            return Err(Error::Data {
                what: "calibration (rows with a measured time or memory that can be understood)"
                    .to_owned(),
                need: 1,
                have: 0,
            });
        }
        // Larger groups first: a small group starts from the constants of the same framework on other GPUs.
        let mut order: Vec<(CaseKey, Vec<Sample>)> = groups.into_iter().collect();
        order.sort_by(|a, b| b.1.len().cmp(&a.1.len()).then_with(|| a.0.cmp(&b.0)));
        let fits = order
            .par_iter()
            .map(|(key, samples)| {
                let relatives: Vec<&Sample> = order
                    .iter()
                    .filter(|(other, _)| other.framework == key.framework && other != key)
                    .flat_map(|(_, samples)| samples)
                    .collect();
                (key.clone(), fit_group(samples, &relatives))
            })
            .collect();
        Ok(Self { fits, memory })
    }

    /// The groups with their constants, the largest group first.
    pub fn fits(&self) -> &[(CaseKey, Fit)] {
        &self.fits
    }

    /// Constants of the memory model by framework.
    pub fn memory(&self) -> &BTreeMap<String, MemoryFit> {
        &self.memory
    }

    /// The fit for a key: of the same framework and GPU, else of the same GPU, else of the same framework as a factor.
    pub fn fit_for(&self, key: &CaseKey) -> Option<&Fit> {
        let of = |same: &dyn Fn(&CaseKey) -> bool| {
            self.fits
                .iter()
                .find(|(known, _)| same(known))
                .map(|(_, fit)| fit)
        };
        of(&|known| known == key).or_else(|| of(&|known| known.gpu == key.gpu))
    }

    /// The cost model with the constants fitted for a framework, on all GPUs with a fit.
    pub fn cost_model(&self, framework: &str) -> AnalyticCost {
        let mut model = AnalyticCost::new();
        if let Some(fit) = self.memory.get(framework) {
            model = model.with_memory_constants(fit.constants);
        }
        for (key, fit) in self.fits.iter().rev() {
            model = model.with_constants(key.gpu.clone(), fit.constants);
        }
        for (key, fit) in self
            .fits
            .iter()
            .rev()
            .filter(|(key, _)| key.framework == framework)
        {
            model = model.with_constants(key.gpu.clone(), fit.constants);
        }
        model
    }

    /// Predicts one row.
    pub fn predict(&self, row: &MeasuredRow) -> Prediction {
        let none = |reason| Prediction {
            iteration_time: None,
            interval: None,
            memory_gib: None,
            reason: Some(reason),
            profiled: false,
        };
        let case = match row.case() {
            Ok(case) => case,
            Err(reason) => return none(reason),
        };
        let fit = self.fit_for(&case.key);
        let (model, factor, interval) = match fit {
            Some(fit) => (
                AnalyticCost::new()
                    .with_constants(case.key.gpu.clone(), fit.constants)
                    .with_shapes(fit.shapes.clone()),
                fit.factor,
                fit.interval,
            ),
            None => (AnalyticCost::new(), 1.0, (-0.5, 0.5)),
        };
        let seconds = match predicted(&case, &model) {
            Ok(seconds) => seconds * factor,
            Err(reason) => return none(reason),
        };
        let profiled = fit
            .zip(shape_of(&case))
            .and_then(|(fit, shape)| LayerProfile::predict(&fit.layers, &case, &shape, seconds));
        let seconds = profiled.unwrap_or(seconds);
        let constants = self
            .memory
            .get(&case.key.framework)
            .map_or_else(MemoryConstants::default, |fit| fit.constants);
        let devices = AnalyticCost::new()
            .with_memory_constants(constants)
            .memory(&case.problem(), &case.configuration)
            .unwrap_or_default();
        let fullest = devices
            .iter()
            .max_by(|a, b| a.bytes.total().total_cmp(&b.bytes.total()));
        let (need, usable, stage) = fullest.map_or((0.0, 0.0, 0), |device| {
            (device.bytes.total(), device.usable, device.stage)
        });
        let reason = (need > usable).then(|| Infeasible::Memory {
            need_gib: need / GIB,
            have_gib: usable / GIB,
            at: format!("stage {stage} on {}", case.key.gpu),
        });
        Prediction {
            iteration_time: Some(seconds),
            interval: Some((seconds * interval.0.exp(), seconds * interval.1.exp())),
            memory_gib: Some(need / GIB),
            reason,
            profiled: profiled.is_some(),
        }
    }
}

fn shape_of(case: &Case) -> Option<ShapeKey> {
    let stage = &case.configuration.replicas[0].stages[0];
    ShapeKey::new(&case.problem(), &case.configuration, stage)
}

fn predicted(case: &Case, model: &AnalyticCost) -> Result<f64, Infeasible> {
    Ok(model.time(&case.problem(), &case.configuration)?.total())
}

/// What is fitted to a group.
#[derive(Debug, Clone)]
struct Fitted {
    constants: Constants,
    factor: f64,
    shapes: BTreeMap<ShapeKey, ShapeFactors>,
    layers: Vec<LayerProfile>,
}

impl Fitted {
    fn factors(&self, sample: &Sample) -> ShapeFactors {
        let of = |key: &ShapeKey| self.shapes.get(key).copied().unwrap_or_default();
        sample
            .shape
            .as_ref()
            .map(|key| of(&key.family()).times(of(key)))
            .unwrap_or_default()
    }

    /// Logarithm of predicted over measured time.
    fn residual(&self, sample: &Sample) -> f64 {
        let error = residual(sample, &self.constants, self.factors(sample)) + self.factor.ln();
        sample
            .shape
            .as_ref()
            .and_then(|shape| {
                let formula = sample.seconds * error.exp();
                LayerProfile::predict(&self.layers, &sample.case, shape, formula)
            })
            .map_or(error, |seconds| (seconds / sample.seconds).ln())
    }
}

fn residual(sample: &Sample, constants: &Constants, factors: ShapeFactors) -> f64 {
    let model = AnalyticCost::uniform(*constants, factors);
    predicted(&sample.case, &model).map_or(0.0, |seconds| (seconds / sample.seconds).ln())
}

fn catalogue(samples: &[&Sample]) -> Constants {
    Constants::of(samples[0].case.cluster.gpu_type(0))
}

fn fit_utilisation(samples: &[&Sample], constants: Constants) -> Fitted {
    let mut values: Vec<f64> = samples
        .iter()
        .map(|sample| residual(sample, &constants, ShapeFactors::default()))
        .collect();
    Fitted {
        constants,
        factor: (-median(&mut values)).exp(),
        shapes: BTreeMap::new(),
        layers: Vec::new(),
    }
}

/// Weights of mean 1 that fall with the root of the number of rows of the same family where that is large: a hundred rows of one width say less about
/// the device than ten of ten widths.
fn family_weights(samples: &[&Sample]) -> Vec<f64> {
    let mut sizes: BTreeMap<Option<ShapeKey>, f64> = BTreeMap::new();
    let family = |sample: &Sample| sample.shape.as_ref().map(ShapeKey::family);
    for sample in samples {
        *sizes.entry(family(sample)).or_default() += 1.0;
    }
    let mut weights: Vec<f64> = samples
        .iter()
        .map(|sample| sizes[&family(sample)].max(LARGE_FAMILY).sqrt().recip())
        .collect();
    let mean = weights.iter().sum::<f64>() / weights.len().max(1) as f64;
    for weight in &mut weights {
        *weight /= mean;
    }
    weights
}

/// All constants around those of `prior`, with the factors of shapes as they are in `start`.
fn fit_constants(samples: &[&Sample], prior: Constants, start: &Fitted) -> Fitted {
    let prior = prior.to_array();
    let unknowns: Vec<Unknown> = prior
        .iter()
        .zip(&BOUNDS)
        .map(|(&prior, bound)| Unknown {
            prior,
            deviation: bound.deviation,
            least: bound.least,
            most: bound.most,
        })
        .collect();
    let factors: Vec<ShapeFactors> = samples.iter().map(|sample| start.factors(sample)).collect();
    let array = |values: &[f64]| {
        let mut array = [0.0; COUNT];
        array.copy_from_slice(values);
        Constants::from_array(array)
    };
    let weights = family_weights(samples);
    let residuals = |values: &[f64]| -> Vec<f64> {
        let constants = array(values);
        samples
            .iter()
            .zip(&factors)
            .zip(&weights)
            .map(|((sample, factors), weight)| weight * residual(sample, &constants, *factors))
            .collect()
    };
    // Launches are hidden or they rule: where they are hidden the objective is flat in them, so both sides are tried.
    let mut found = minimise(&unknowns, &start.constants.to_array(), &residuals);
    if start.shapes.is_empty() {
        let launch = BOUNDS.iter().position(|bound| bound.name == "launch");
        let mut slow = prior;
        if let Some(index) = launch {
            slow[index] = 4e-5;
        }
        let other = minimise(&unknowns, &slow, &residuals);
        let size = |values: &[f64]| residuals(values).iter().map(|r| r.abs()).sum::<f64>();
        if size(&other) < size(&found) {
            found = other;
        }
    }
    Fitted {
        constants: array(&found),
        factor: 1.0,
        shapes: start.shapes.clone(),
        layers: Vec::new(),
    }
}

/// The factors of each family of measured shapes and of each shape around the constants of `start`; their logarithms have the
/// prior deviations given.
fn fit_shapes(samples: &[&Sample], start: &Fitted, deviations: (f64, f64)) -> Fitted {
    let mut fitted = Fitted {
        shapes: BTreeMap::new(),
        ..start.clone()
    };
    // A single row far off is more often a bad measurement than a shape unlike all others: beyond twice the usual error the
    // pull on the factors grows with the logarithm only.
    let mut errors: Vec<f64> = samples
        .iter()
        .map(|sample| residual(sample, &start.constants, ShapeFactors::default()).abs())
        .collect();
    let usual = 2.0 * median(&mut errors).max(0.005);
    for (family, deviation) in [(true, deviations.0), (false, deviations.1)] {
        let mut groups: BTreeMap<ShapeKey, Vec<&Sample>> = BTreeMap::new();
        for sample in samples {
            if let Some(key) = &sample.shape {
                let key = if family { key.family() } else { key.clone() };
                groups.entry(key).or_default().push(sample);
            }
        }
        let unknown = Unknown {
            prior: 0.0,
            deviation,
            least: -SHAPE_LIMIT,
            most: SHAPE_LIMIT,
        };
        let factors = |values: &[f64]| ShapeFactors {
            block: values[0].exp(),
            ends: values[1].exp(),
        };
        let found: Vec<_> = groups
            .into_iter()
            .map(|(key, samples)| {
                let base: Vec<ShapeFactors> = samples
                    .iter()
                    .map(|sample| fitted.factors(sample))
                    .collect();
                let found = minimise(&[unknown; 2], &[0.0, 0.0], &|values| {
                    samples
                        .iter()
                        .zip(&base)
                        .map(|(sample, base)| {
                            let factors = base.times(factors(values));
                            let error = residual(sample, &start.constants, factors);
                            usual * (error / usual).asinh()
                        })
                        .collect()
                });
                (key, factors(&found))
            })
            .collect();
        fitted.shapes.extend(found);
    }
    fitted
}

/// The kinds of fit that compete, the simplest first. `related` are constants found on other GPUs with the same framework.
fn fit_all(samples: &[&Sample], related: Option<Constants>) -> Vec<(FitKind, Fitted)> {
    let own = catalogue(samples);
    let utilisation = fit_utilisation(samples, own);
    let mut fits = vec![(FitKind::Utilisation, utilisation.clone())];
    if let Some(related) = related {
        fits.push((FitKind::Utilisation, fit_utilisation(samples, related)));
    }
    if samples.len() >= FEW {
        let mut prior = own;
        fits.push((FitKind::Full, fit_constants(samples, own, &utilisation)));
        if let Some(related) = related {
            let start = Fitted {
                constants: related,
                ..utilisation
            };
            prior = related;
            fits.push((FitKind::Full, fit_constants(samples, related, &start)));
        }
        let full = fits[fits.len() - 1].1.clone();
        for deviations in SHAPE_DEVIATIONS {
            let mut fitted = fit_shapes(samples, &full, deviations);
            // The factors leave other residuals than the constants were fitted to.
            fitted = fit_shapes(samples, &fit_constants(samples, prior, &fitted), deviations);
            fits.push((FitKind::Shapes, fitted));
        }
        let rows = samples
            .iter()
            .filter_map(|sample| Some((&sample.case, sample.shape.as_ref()?, sample.seconds)));
        let layers = LayerProfile::fit(rows);
        if !layers.is_empty() {
            let shaped: Vec<Fitted> = fits
                .iter()
                .filter(|(kind, _)| *kind == FitKind::Shapes)
                .map(|(_, fitted)| fitted.clone())
                .collect();
            fits.extend(shaped.into_iter().map(|fitted| {
                let layers = layers.clone();
                (FitKind::Layers, Fitted { layers, ..fitted })
            }));
        }
    }
    fits
}

/// Constants found on the rows of the same framework on other GPUs, around this GPU's catalogue values.
fn related(samples: &[Sample], relatives: &[&Sample]) -> Option<Constants> {
    if relatives.len() < FEW {
        return None;
    }
    let prior = Constants::of(samples[0].case.cluster.gpu_type(0));
    let start = Fitted {
        constants: prior,
        factor: 1.0,
        shapes: BTreeMap::new(),
        layers: Vec::new(),
    };
    Some(fit_constants(relatives, prior, &start).constants)
}

fn fit_group(samples: &[Sample], relatives: &[&Sample]) -> Fit {
    let all: Vec<&Sample> = samples.iter().collect();
    let related = related(samples, relatives);
    let mut fits = fit_all(&all, related);
    let folds = if all.len() < SMALL {
        FOLDS_OF_FEW
    } else {
        FOLDS
    }
    .min(all.len());
    // Residuals (measured over predicted) of every sample when its fold is held out, by kind of fit.
    let mut errors: Vec<Vec<f64>> = vec![Vec::new(); fits.len()];
    if folds > 1 {
        let held: Vec<Vec<Vec<f64>>> = (0..folds)
            .into_par_iter()
            .map(|fold| {
                let part = |inside: bool| -> Vec<&Sample> {
                    let samples = all.iter().enumerate();
                    samples
                        .filter(|(index, _)| (index % folds == fold) == inside)
                        .map(|(_, sample)| *sample)
                        .collect()
                };
                let test = part(true);
                fit_all(&part(false), related)
                    .iter()
                    .map(|(_, fitted)| test.iter().map(|sample| -fitted.residual(sample)).collect())
                    .collect()
            })
            .collect();
        // A fold can be too small for the richer fits; then they do not compete.
        let kinds = held.iter().map(Vec::len).min().unwrap_or(0);
        fits.truncate(kinds);
        errors.truncate(kinds);
        for fold in held {
            for (errors, fold) in errors.iter_mut().zip(fold) {
                errors.extend(fold);
            }
        }
    } else {
        errors[0] = vec![-0.3, 0.3];
    }
    let mean = |values: &[f64]| values.iter().map(|r| r.abs()).sum::<f64>() / values.len() as f64;
    // Rows that no fit explains must not decide between them: beyond three times the usual error they count by their logarithm.
    let usual = errors
        .iter()
        .map(|values| median(&mut values.iter().map(|r| r.abs()).collect::<Vec<_>>()))
        .fold(f64::INFINITY, f64::min);
    let scale = (3.0 * usual).max(SCORE_SCALE);
    let score = |values: &[f64]| {
        let compressed = values.iter().map(|r| (r.abs() / scale).asinh());
        compressed.sum::<f64>() / values.len() as f64
    };
    let best = (0..fits.len())
        .min_by(|&a, &b| score(&errors[a]).total_cmp(&score(&errors[b])))
        .unwrap_or(0);
    let (kind, fitted) = fits.swap_remove(best);
    let mut errors = errors.swap_remove(best);
    errors.sort_by(f64::total_cmp);
    // Few held-out residuals do not show their tails: widen by what a sample of this size misses.
    let widen = 1.0 + 2.0 / (errors.len() as f64).sqrt();
    Fit {
        kind,
        rows: samples.len(),
        constants: fitted.constants,
        factor: fitted.factor,
        shapes: ShapeTable::new(fitted.shapes.into_iter().collect()),
        layers: fitted.layers,
        error: mean(&errors),
        interval: (
            (quantile(&errors, 0.05) * widen).min(0.0),
            (quantile(&errors, 0.95) * widen).max(0.0),
        ),
    }
}

/// Quantile of sorted values, interpolated.
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    match sorted {
        [] => 0.0,
        [only] => *only,
        _ => {
            let at = q * (sorted.len() - 1) as f64;
            let low = at.floor() as usize;
            let high = (low + 1).min(sorted.len() - 1);
            sorted[low] + (at - low as f64) * (sorted[high] - sorted[low])
        }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(values, 0.5)
}
