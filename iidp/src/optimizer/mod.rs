//! Optimizers on flat buffers: one fused pass over parameters, gradients and moments.
//!
//! A model's parameters lie in one buffer, each in its range; the optimizer keeps its moments in buffers of the same shape. A step reads and
//! writes every element once (LAMB and LARS twice, for their norms), in pieces that the threads of the current rayon pool share. The result does not depend
//! on the number of threads.
//!
//! The formulas, their order of operations and their defaults are those of Burn's optimizers, which LARS is not among: with equal gradients SGD, Adam
//! and `AdamW` give the same bits, LAMB the same up to the precision of its norms.
//!
//! [`ShardedOptimizer`] keeps only this rank's share of the moments (`ZeRO` stage 1).

mod config;
mod kernel;
mod zero;

use std::collections::BTreeMap;
use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::error::Error;
pub use config::{AdamConfig, AdamWConfig, LambConfig, LarsConfig, OptimizerConfig, SgdConfig};
pub use kernel::squared_norm;
use kernel::{Piece, Rates};
pub use zero::ShardedOptimizer;

/// Elements per unit of parallel work: four buffers of it fit in a core's second-level cache.
const UNIT: usize = 16 * 1024;

/// An optimizer for the parameters in one flat buffer.
#[derive(Debug, Clone)]
pub struct Optimizer {
    config: OptimizerConfig,
    parameters: Vec<Range<usize>>,
    /// Whether weight decay applies to a parameter.
    decayed: Vec<bool>,
    /// Updates of each parameter.
    steps: Vec<u64>,
    moments: [Vec<f32>; 2],
}

/// What one step does beside the learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOptions<'a> {
    /// Learning rate.
    pub learning_rate: f64,
    /// Factor of every gradient, such as the coefficient of clipping by global norm or the inverse of a loss scale.
    pub gradient_scale: f32,
    /// One flag per parameter; those without are left as they are, moments and step count too. None updates all.
    pub active: Option<&'a [bool]>,
}

impl StepOptions<'_> {
    /// All parameters, gradients as they are.
    pub const fn new(learning_rate: f64) -> Self {
        Self {
            learning_rate,
            gradient_scale: 1.0,
            active: None,
        }
    }
}

/// Everything an optimizer remembers; what it was at any layout of shards.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct OptimizerState {
    /// Updates of each parameter.
    pub steps: Vec<u64>,
    /// The moments by name (`velocity`; `moment_1`, `moment_2`), each as long as the flat buffer.
    pub moments: BTreeMap<String, Vec<f32>>,
}

impl Optimizer {
    fn new(config: OptimizerConfig, parameters: &[Range<usize>]) -> Result<Self, Error> {
        config.validate()?;
        let mut end = 0;
        for range in parameters {
            if range.start != end || range.end < range.start {
                return Err(Error::Invalid {
                    what: "parameter ranges",
                    problem: format!(
                        "{}..{} after {end}, expected ranges that follow each other",
                        range.start, range.end
                    ),
                });
            }
            end = range.end;
        }
        let kept = config.moments().len();
        Ok(Self {
            config,
            parameters: parameters.to_vec(),
            decayed: vec![true; parameters.len()],
            steps: vec![0; parameters.len()],
            moments: [0, 1].map(|i| if i < kept { vec![0.0; end] } else { Vec::new() }),
        })
    }

    /// Exempts parameters, by index, from weight decay (biases and norms, usually).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an index that is not a parameter.
    pub fn without_decay(
        mut self,
        parameters: impl IntoIterator<Item = usize>,
    ) -> Result<Self, Error> {
        let count = self.parameters.len();
        for index in parameters {
            *self.decayed.get_mut(index).ok_or_else(|| Error::Invalid {
                what: "parameter without weight decay",
                problem: format!("index {index}, expected less than {count}"),
            })? = false;
        }
        Ok(self)
    }

    /// The settings.
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// Elements of the flat buffer.
    pub fn len(&self) -> usize {
        self.parameters.last().map_or(0, |range| range.end)
    }

    /// Whether there is nothing to optimise.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Updates `values` with the gradients of all parameters.
    ///
    /// Computes in O(n) over the threads of the current rayon pool.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] when a buffer is not as long as the parameters together.
    pub fn step(
        &mut self,
        values: &mut [f32],
        gradients: &[f32],
        learning_rate: f64,
    ) -> Result<(), Error> {
        self.step_with(values, gradients, StepOptions::new(learning_rate))
    }

    /// [`step`](Self::step) with a factor for the gradients and a choice of parameters.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] when a buffer or the choice has the wrong length.
    pub fn step_with(
        &mut self,
        values: &mut [f32],
        gradients: &[f32],
        options: StepOptions<'_>,
    ) -> Result<(), Error> {
        self.step_reducing(values, gradients, options, |_| Ok(()))
    }

    /// A step in which `reduce` may add other shards' squared norms (two per parameter) to those found here.
    fn step_reducing(
        &mut self,
        values: &mut [f32],
        gradients: &[f32],
        options: StepOptions<'_>,
        reduce: impl FnOnce(&mut [f64]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        check_length("parameter buffer", values.len(), self.len())?;
        check_length("gradient buffer", gradients.len(), self.len())?;
        if let Some(active) = options.active {
            check_length("choice of parameters", active.len(), self.parameters.len())?;
        }
        let is_active = |index: usize| options.active.is_none_or(|active| active[index]);
        for (index, step) in self.steps.iter_mut().enumerate() {
            *step += u64::from(is_active(index));
        }
        let mut rates: Vec<Option<Rates>> = (0..self.parameters.len())
            .map(|index| {
                is_active(index).then(|| Rates {
                    rate: options.learning_rate,
                    scale: options.gradient_scale,
                    step: self.steps[index],
                    decayed: self.decayed[index],
                    trust: 1.0,
                })
            })
            .collect();
        let config = self.config;
        if config.has_norms() {
            let units = self.units(values, gradients);
            let partial = on_pool(units, |unit| {
                let mut norms = Vec::new();
                unit.for_each(&rates, |index, mut piece, rates| {
                    norms.push((index, config.measure(&mut piece, rates)));
                });
                norms
            });
            // Units are added in their order, whichever thread had them.
            let mut norms = vec![0.0; 2 * self.parameters.len()];
            for (index, [parameter, other]) in partial.into_iter().flatten() {
                norms[2 * index] += parameter;
                norms[2 * index + 1] += other;
            }
            reduce(&mut norms)?;
            for ((rates, norms), decayed) in
                rates.iter_mut().zip(norms.as_chunks().0).zip(&self.decayed)
            {
                if let Some(rates) = rates {
                    rates.trust = config.trust(*norms, *decayed);
                }
            }
        }
        let units = self.units(values, gradients);
        on_pool(units, |unit| {
            unit.for_each(&rates, |_, piece, rates| config.apply(piece, rates));
        });
        Ok(())
    }

    fn units<'a>(&'a mut self, values: &'a mut [f32], gradients: &'a [f32]) -> Vec<Unit<'a>> {
        let [m, v] = &mut self.moments;
        let (mut m, mut v) = (m.chunks_mut(UNIT), v.chunks_mut(UNIT));
        let parameters = &self.parameters;
        values
            .chunks_mut(UNIT)
            .zip(gradients.chunks(UNIT))
            .enumerate()
            .map(|(unit, (p, g))| Unit {
                start: unit * UNIT,
                parameters,
                piece: Piece {
                    p,
                    g,
                    m: m.next().unwrap_or_default(),
                    v: v.next().unwrap_or_default(),
                },
            })
            .collect()
    }

    /// A copy of everything that has to be kept to continue with the same bits.
    pub fn state(&self) -> OptimizerState {
        let names = self.config.moments().iter().map(ToString::to_string);
        OptimizerState {
            steps: self.steps.clone(),
            moments: names.zip(self.moments.iter().cloned()).collect(),
        }
    }

    /// Continues from `state`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the state is another optimizer's, [`Error::LengthMismatch`] when it is for other parameters; nothing is changed then.
    pub fn restore(&mut self, state: &OptimizerState) -> Result<(), Error> {
        self.restore_part(state, 0..self.len(), self.len())
    }

    /// Continues from elements `part` of a state for `whole` elements.
    fn restore_part(
        &mut self,
        state: &OptimizerState,
        part: Range<usize>,
        whole: usize,
    ) -> Result<(), Error> {
        let names = self.config.moments();
        if !state
            .moments
            .keys()
            .map(String::as_str)
            .eq(names.iter().copied())
        {
            let got: Vec<_> = state.moments.keys().collect();
            return Err(Error::Invalid {
                what: "optimizer state",
                problem: format!("moments {got:?}, expected {names:?}"),
            });
        }
        check_length(
            "step counts of the optimizer state",
            state.steps.len(),
            self.steps.len(),
        )?;
        for (name, values) in &state.moments {
            check_length(name, values.len(), whole)?;
        }
        self.steps.copy_from_slice(&state.steps);
        for (moment, values) in self.moments.iter_mut().zip(state.moments.values()) {
            moment.copy_from_slice(&values[part.clone()]);
        }
        Ok(())
    }
}

fn check_length(what: &str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::LengthMismatch {
            what: what.into(),
            got,
            expected,
        })
    }
}

/// Consecutive elements of the flat buffers, of one or more parameters.
struct Unit<'a> {
    start: usize,
    parameters: &'a [Range<usize>],
    piece: Piece<'a>,
}

impl Unit<'_> {
    /// Calls `body` for the piece of each parameter that has rates.
    fn for_each(self, rates: &[Option<Rates>], mut body: impl FnMut(usize, Piece<'_>, Rates)) {
        let Piece { p, g, m, v } = self.piece;
        let end = self.start + p.len();
        let first = self
            .parameters
            .partition_point(|range| range.end <= self.start);
        for (index, range) in self
            .parameters
            .iter()
            .enumerate()
            .skip(first)
            .take_while(|(_, range)| range.start < end)
        {
            let here = range.start.max(self.start) - self.start..range.end.min(end) - self.start;
            if let (Some(rates), false) = (rates[index], here.is_empty()) {
                let moment = |moment: &mut [f32]| {
                    if moment.is_empty() {
                        0..0
                    } else {
                        here.clone()
                    }
                };
                let (in_m, in_v) = (moment(m), moment(v));
                let piece = Piece {
                    p: &mut p[here.clone()],
                    g: &g[here],
                    m: &mut m[in_m],
                    v: &mut v[in_v],
                };
                body(index, piece, rates);
            }
        }
    }
}

/// Maps the units in the current pool, results in order.
fn on_pool<'a, R: Send>(
    units: Vec<Unit<'a>>,
    work: impl Fn(Unit<'a>) -> R + Sync + Send,
) -> Vec<R> {
    if units.len() == 1 {
        return units.into_iter().map(work).collect();
    }
    units.into_par_iter().map(work).collect()
}
