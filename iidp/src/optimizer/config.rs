//! Settings of the optimizers; defaults are those of Burn's optimizers of the same name.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Optimizer;
use crate::error::Error;

/// Which optimizer updates the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OptimizerConfig {
    /// Stochastic gradient descent.
    Sgd(SgdConfig),
    /// Adam, weight decay as part of the gradient.
    Adam(AdamConfig),
    /// Adam with decoupled weight decay.
    AdamW(AdamWConfig),
    /// Layer-wise adaptive moments for large batches.
    Lamb(LambConfig),
    /// Layer-wise adaptive rate scaling of momentum SGD for large batches.
    Lars(LarsConfig),
}

impl OptimizerConfig {
    /// An optimizer for a flat buffer in which parameter i occupies `parameters[i]`; the ranges follow each other from 0 without gaps.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a setting outside its domain, or for ranges with gaps.
    ///
    /// # Examples
    ///
    /// ```
    /// use iidp::optimizer::{OptimizerConfig, SgdConfig};
    ///
    /// let config = OptimizerConfig::from(SgdConfig::new().with_momentum(0.9));
    /// // A weight of 4 elements and a bias of 2.
    /// let mut optimizer = config.init(&[0..4, 4..6])?;
    /// let mut parameters = [1.0; 6];
    /// optimizer.step(&mut parameters, &[0.5; 6], 0.1)?;
    /// assert_eq!(parameters, [0.95; 6]);
    /// # Ok::<(), iidp::Error>(())
    /// ```
    pub fn init(&self, parameters: &[Range<usize>]) -> Result<Optimizer, Error> {
        Optimizer::new(*self, parameters)
    }

    /// Names of the buffers that the optimizer keeps, one element per parameter element each.
    pub(super) fn moments(&self) -> &'static [&'static str] {
        match self {
            Self::Sgd(config) if config.momentum == 0.0 => &[],
            Self::Sgd(_) | Self::Lars(_) => &["velocity"],
            Self::Adam(_) | Self::AdamW(_) | Self::Lamb(_) => &["moment_1", "moment_2"],
        }
    }

    pub(super) fn validate(&self) -> Result<(), Error> {
        match self {
            Self::Sgd(c) => {
                check("momentum", c.momentum, 0.0..1.0)?;
                check("dampening", c.dampening as f32, 0.0..f32::INFINITY)?;
                check("weight decay", c.weight_decay, 0.0..f32::INFINITY)
            }
            Self::Adam(AdamConfig {
                beta_1,
                beta_2,
                epsilon,
                weight_decay,
            })
            | Self::AdamW(AdamWConfig {
                beta_1,
                beta_2,
                epsilon,
                weight_decay,
            })
            | Self::Lamb(LambConfig {
                beta_1,
                beta_2,
                epsilon,
                weight_decay,
                ..
            }) => {
                check("beta 1", *beta_1, 0.0..1.0)?;
                check("beta 2", *beta_2, 0.0..1.0)?;
                check("epsilon", *epsilon, 0.0..f32::INFINITY)?;
                check("weight decay", *weight_decay, 0.0..f32::INFINITY)
            }
            Self::Lars(c) => {
                check("momentum", c.momentum, 0.0..1.0)?;
                check("weight decay", c.weight_decay, 0.0..f32::INFINITY)?;
                check(
                    "trust coefficient",
                    c.trust_coefficient,
                    f32::MIN_POSITIVE..f32::INFINITY,
                )?;
                check("epsilon", c.epsilon, 0.0..f32::INFINITY)
            }
        }
    }
}

fn check(what: &'static str, value: f32, domain: Range<f32>) -> Result<(), Error> {
    if domain.contains(&value) {
        return Ok(());
    }
    Err(Error::Invalid {
        what,
        problem: format!(
            "{value}, expected a number in {}..{}",
            domain.start, domain.end
        ),
    })
}

/// Stochastic gradient descent with optional momentum and weight decay.
///
/// With gradient g, parameter p, velocity u (the first u is g):
/// `g += decay p`, `u = momentum u + (1 - dampening) g`, then `p -= rate u`, or with Nesterov's method `p -= rate (g + momentum u)`
/// (Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SgdConfig {
    /// Momentum in [0, 1); 0 for none.
    pub momentum: f32,
    /// How much of each new gradient is left out of the velocity.
    pub dampening: f64,
    /// Whether to use Nesterov's method.
    pub nesterov: bool,
    /// Factor of the parameter that is added to its gradient.
    pub weight_decay: f32,
}

/// Adam (Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1, in the order of section 2's last paragraph), weight decay added to
/// the gradient.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdamConfig {
    /// Decay of the first moment, in [0, 1).
    pub beta_1: f32,
    /// Decay of the second moment, in [0, 1).
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Factor of the parameter that is added to its gradient.
    pub weight_decay: f32,
}

/// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdamWConfig {
    /// Decay of the first moment, in [0, 1).
    pub beta_1: f32,
    /// Decay of the second moment, in [0, 1).
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Share of the parameter, times the learning rate, that each step takes away.
    pub weight_decay: f32,
}

/// LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2, with the identity for the scaling function).
///
/// Norms are taken over each parameter range in double precision.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LambConfig {
    /// Decay of the first moment, in [0, 1).
    pub beta_1: f32,
    /// Decay of the second moment, in [0, 1).
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Share of the parameter that is added to its update before scaling.
    pub weight_decay: f32,
    /// Whether each parameter's update is scaled by the ratio of the parameter's norm to the update's.
    pub use_trust_ratio: bool,
}

/// LARS (You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1).
///
/// With gradient g, parameter p, velocity u: the local rate is `trust |p| / (|g| + decay |p| + epsilon)`, or 1 where `|p|` or `|g|` is 0;
/// `u = momentum u + rate local (g + decay p)`, `p -= u`. A parameter that is exempt from weight decay keeps local rate 1, as is usual for biases and norms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LarsConfig {
    /// Momentum in [0, 1).
    pub momentum: f32,
    /// Factor of the parameter that is added to its gradient.
    pub weight_decay: f32,
    /// How far a layer is trusted to move, relative to its norm.
    pub trust_coefficient: f32,
    /// Added to the denominator of the local rate.
    pub epsilon: f32,
}

/// `new`, `Default`, one setter per field, and the conversion into [`OptimizerConfig`].
macro_rules! settings {
    ($config:ident, $variant:ident, $($field:ident: $type:ty = $default:expr, $setter:ident;)*) => {
        impl $config {
            /// The default settings.
            pub const fn new() -> Self {
                Self { $($field: $default),* }
            }

            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub const fn $setter(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }

        impl Default for $config {
            fn default() -> Self {
                Self::new()
            }
        }

        impl From<$config> for OptimizerConfig {
            fn from(config: $config) -> Self {
                Self::$variant(config)
            }
        }
    };
}

settings!(SgdConfig, Sgd,
    momentum: f32 = 0.0, with_momentum;
    dampening: f64 = 0.1, with_dampening;
    nesterov: bool = false, with_nesterov;
    weight_decay: f32 = 0.0, with_weight_decay;
);
settings!(AdamConfig, Adam,
    beta_1: f32 = 0.9, with_beta_1;
    beta_2: f32 = 0.999, with_beta_2;
    epsilon: f32 = 1e-5, with_epsilon;
    weight_decay: f32 = 0.0, with_weight_decay;
);
settings!(AdamWConfig, AdamW,
    beta_1: f32 = 0.9, with_beta_1;
    beta_2: f32 = 0.999, with_beta_2;
    epsilon: f32 = 1e-5, with_epsilon;
    weight_decay: f32 = 1e-4, with_weight_decay;
);
settings!(LambConfig, Lamb,
    beta_1: f32 = 0.9, with_beta_1;
    beta_2: f32 = 0.999, with_beta_2;
    epsilon: f32 = 1e-6, with_epsilon;
    weight_decay: f32 = 0.0, with_weight_decay;
    use_trust_ratio: bool = true, with_use_trust_ratio;
);
settings!(LarsConfig, Lars,
    momentum: f32 = 0.9, with_momentum;
    weight_decay: f32 = 0.0, with_weight_decay;
    trust_coefficient: f32 = 0.001, with_trust_coefficient;
    epsilon: f32 = 1e-8, with_epsilon;
);
