//! The arithmetic of one step on a contiguous piece of one parameter.
//!
//! Every loop runs over slices of equal length without branches, so the compiler vectorises it, for every vector extension of which the
//! processor's widest is then run. Operations are in the order and precision of Burn's optimizers (nothing is contracted into fused multiplications): on the
//! same gradients the results of SGD, Adam and `AdamW` have the same bits.

#![allow(
    clippy::inline_always,
    reason = "what is not inlined into a kernel is not compiled for the kernel's vector extension"
)]

use macerator::{AutoArch, Simd, WithSimd};

use super::config::OptimizerConfig;

/// A piece of a parameter with its gradient and moments; `m` and `v` are empty where the optimizer has none.
pub(super) struct Piece<'a> {
    pub(super) p: &'a mut [f32],
    pub(super) g: &'a [f32],
    pub(super) m: &'a mut [f32],
    pub(super) v: &'a mut [f32],
}

/// What a step needs to know about one parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    /// Learning rate.
    pub(super) rate: f64,
    /// Factor of the gradient.
    pub(super) scale: f32,
    /// Updates of this parameter, with this one.
    pub(super) step: u64,
    /// Whether weight decay applies.
    pub(super) decayed: bool,
    /// Norm-based factor of the update, set between the two passes of LAMB and LARS.
    pub(super) trust: f32,
}

impl OptimizerConfig {
    /// Whether the step needs [`measure`](Self::measure) and [`trust`](Self::trust) before [`apply`](Self::apply).
    pub(super) fn has_norms(&self) -> bool {
        matches!(self, Self::Lamb(config) if config.use_trust_ratio)
            || matches!(self, Self::Lars(_))
    }

    /// First pass: the squared norms of the piece of the parameter and of its update (LAMB) or gradient (LARS).
    pub(super) fn measure(&self, piece: &mut Piece<'_>, rates: Rates) -> [f64; 2] {
        let Piece { p, g, m, v } = piece;
        if let Self::Lamb(config) = self {
            update_moments(g, m, v, config.beta_1, config.beta_2, rates.scale);
            let lamb = Lamb::new(config, rates);
            let mut norms = [[0.0_f64; LANES]; 2];
            let [(p, p_rest), (m, m_rest), (v, v_rest)] =
                [&**p, &**m, &**v].map(<[f32]>::as_chunks::<LANES>);
            for ((p, m), v) in p.iter().zip(m).zip(v) {
                for lane in 0..LANES {
                    let u = lamb.update(p[lane], m[lane], v[lane]);
                    norms[0][lane] += f64::from(p[lane]) * f64::from(p[lane]);
                    norms[1][lane] += f64::from(u) * f64::from(u);
                }
            }
            for (lane, ((p, m), v)) in p_rest.iter().zip(m_rest).zip(v_rest).enumerate() {
                let u = lamb.update(*p, *m, *v);
                norms[0][lane] += f64::from(*p) * f64::from(*p);
                norms[1][lane] += f64::from(u) * f64::from(u);
            }
            norms.map(|lanes| lanes.iter().sum())
        } else {
            [
                squared_norm(p),
                squared_norm(g) * f64::from(rates.scale) * f64::from(rates.scale),
            ]
        }
    }

    /// The factor of a parameter's update, from the squared norms of the whole parameter.
    pub(super) fn trust(&self, [parameter, other]: [f64; 2], decayed: bool) -> f32 {
        let (parameter, other) = (parameter.sqrt() as f32, other.sqrt() as f32);
        // A NaN among the norms keeps 1 and shows in the parameters.
        if !(parameter > 0.0 && other > 0.0) {
            return 1.0;
        }
        match self {
            Self::Lars(config) if decayed => {
                config.trust_coefficient * parameter
                    / (other + config.weight_decay * parameter + config.epsilon)
            }
            Self::Lars(_) => 1.0,
            _ => parameter / other.max(f32::MIN_POSITIVE),
        }
    }

    /// Updates the piece.
    pub(super) fn apply(&self, piece: Piece<'_>, rates: Rates) {
        AutoArch::new().dispatch(Apply {
            config: self,
            piece,
            rates,
        });
    }

    #[inline(always)]
    fn apply_here(&self, piece: Piece<'_>, rates: Rates) {
        let Piece { p, g, m, v } = piece;
        let Rates {
            rate,
            scale,
            step,
            decayed,
            trust,
        } = rates;
        let decay = |decay: f32| if decayed { decay } else { 0.0 };
        let time = i32::try_from(step).unwrap_or(i32::MAX);
        match self {
            Self::Sgd(config) => {
                let (rate, decay) = (rate as f32, decay(config.weight_decay));
                if config.momentum == 0.0 {
                    for (p, g) in p.iter_mut().zip(g) {
                        *p -= (*p * decay + *g * scale) * rate;
                    }
                    return;
                }
                let momentum = config.momentum;
                // The first velocity is the whole gradient.
                let (keep, take) = if step == 1 {
                    (0.0, 1.0)
                } else {
                    (momentum, (1.0 - config.dampening) as f32)
                };
                let nesterov = if config.nesterov { momentum } else { 0.0 };
                for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
                    let g = *p * decay + *g * scale;
                    *m = g * take + *m * keep;
                    let update = if config.nesterov {
                        *m * nesterov + g
                    } else {
                        *m
                    };
                    *p -= update * rate;
                }
            }
            Self::Adam(config) => {
                let (rate, decay) = (rate as f32, decay(config.weight_decay));
                let (beta_1, beta_2) = (config.beta_1, config.beta_2);
                let (factor_1, factor_2) = (1.0 - beta_1, 1.0 - beta_2);
                let root = (1.0 - beta_2.powi(time)).sqrt();
                let correction = root / (1.0 - beta_1.powi(time));
                let epsilon = config.epsilon * root;
                for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                    let g = *p * decay + *g * scale;
                    *m = *m * beta_1 + g * factor_1;
                    *v = *v * beta_2 + g * g * factor_2;
                    *p -= *m * correction / (v.sqrt() + epsilon) * rate;
                }
            }
            Self::AdamW(config) => {
                let keep = (1.0 - rate * f64::from(decay(config.weight_decay))) as f32;
                let rate = rate as f32;
                let (beta_1, beta_2, epsilon) = (config.beta_1, config.beta_2, config.epsilon);
                let (factor_1, factor_2) = (1.0 - beta_1, 1.0 - beta_2);
                let (bias_1, bias_2) = (1.0 - beta_1.powi(time), 1.0 - beta_2.powi(time));
                for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                    let g = *g * scale;
                    *m = *m * beta_1 + g * factor_1;
                    *v = *v * beta_2 + g * g * factor_2;
                    *p = *p * keep - *m / bias_1 / ((*v / bias_2).sqrt() + epsilon) * rate;
                }
            }
            Self::Lamb(config) => {
                if !config.use_trust_ratio {
                    update_moments(g, m, v, config.beta_1, config.beta_2, scale);
                }
                let lamb = Lamb::new(config, rates);
                let rate = rate as f32;
                for ((p, m), v) in p.iter_mut().zip(m.iter()).zip(v.iter()) {
                    *p -= lamb.update(*p, *m, *v) * trust * rate;
                }
            }
            Self::Lars(config) => {
                let rate = (rate * f64::from(trust)) as f32;
                let (momentum, decay) = (config.momentum, decay(config.weight_decay));
                for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
                    *m = *m * momentum + (*p * decay + *g * scale) * rate;
                    *p -= *m;
                }
            }
        }
    }
}

/// [`OptimizerConfig::apply`] as a kernel.
struct Apply<'a> {
    config: &'a OptimizerConfig,
    piece: Piece<'a>,
    rates: Rates,
}

impl WithSimd for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self) {
        self.config.apply_here(self.piece, self.rates);
    }
}

#[inline(always)]
fn update_moments(g: &[f32], m: &mut [f32], v: &mut [f32], beta_1: f32, beta_2: f32, scale: f32) {
    let (factor_1, factor_2) = (1.0 - beta_1, 1.0 - beta_2);
    for ((g, m), v) in g.iter().zip(m).zip(v) {
        let g = *g * scale;
        *m = *m * beta_1 + g * factor_1;
        *v = *v * beta_2 + g * g * factor_2;
    }
}

/// LAMB's update before the trust ratio.
struct Lamb {
    bias_1: f32,
    bias_2: f32,
    epsilon: f32,
    decay: f32,
}

impl Lamb {
    fn new(config: &super::LambConfig, rates: Rates) -> Self {
        let time = i32::try_from(rates.step).unwrap_or(i32::MAX);
        Self {
            bias_1: 1.0 - config.beta_1.powi(time),
            bias_2: 1.0 - config.beta_2.powi(time),
            epsilon: config.epsilon,
            decay: if rates.decayed {
                config.weight_decay
            } else {
                0.0
            },
        }
    }

    #[inline(always)]
    fn update(&self, p: f32, m: f32, v: f32) -> f32 {
        m / self.bias_1 / ((v / self.bias_2).sqrt() + self.epsilon) + p * self.decay
    }
}

/// Independent partial sums, so that additions in f64 vectorise; a fixed number keeps the result the same on every machine.
const LANES: usize = 8;

/// The sum of squares, in double precision: the square of a gradient's norm, for clipping. Computes in O(n).
///
/// # Examples
///
/// ```
/// assert_eq!(iidp::optimizer::squared_norm(&[3.0, 4.0]), 25.0);
/// ```
pub fn squared_norm(values: &[f32]) -> f64 {
    AutoArch::new().dispatch(SquaredNorm(values))
}

/// [`squared_norm`] as a kernel.
struct SquaredNorm<'a>(&'a [f32]);

impl WithSimd for SquaredNorm<'_> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self) -> f64 {
        squared_norm_here(self.0)
    }
}

#[inline(always)]
fn squared_norm_here(values: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (whole, rest) = values.as_chunks::<LANES>();
    for values in whole {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(*value) * f64::from(*value);
    }
    lanes.iter().sum()
}
