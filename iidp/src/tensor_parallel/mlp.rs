//! The feed-forward half of a transformer layer.

use burn::module::{Initializer, Module};
use burn::tensor::{Device, Tensor, activation};

use super::{ColumnParallelLinear, RowParallelLinear, TensorParallel, nested};
use crate::{Error, ShardSpec};

/// What lies between the two linear maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum Activate {
    /// `gelu(x U)`; Hendrycks and Gimpel 2016.
    #[default]
    Gelu,
    /// `silu(x G) * (x U)`; Shazeer 2020, equation 6.
    SwiGlu,
}

/// A pair of linear layers, the first cut by columns, the second by rows.
#[derive(Module, Debug)]
pub struct ParallelMlp {
    /// `[width, hidden]`.
    pub up: ColumnParallelLinear,
    /// `[width, hidden]`, with [`Activate::SwiGlu`] only.
    pub gate: Option<ColumnParallelLinear>,
    /// `[hidden, width]`.
    pub down: RowParallelLinear,
}

impl ParallelMlp {
    /// The whole pair; `residual` initialises the layer whose output is added to the residual stream.
    pub fn new(
        width: usize,
        hidden: usize,
        activate: Activate,
        initializer: &Initializer,
        residual: &Initializer,
        device: &Device,
    ) -> Self {
        // As in the models that use it, SwiGLU comes without biases.
        let bias = activate == Activate::Gelu;
        let column = || ColumnParallelLinear::new(width, hidden, bias, initializer, device);
        Self {
            up: column(),
            gate: (activate == Activate::SwiGlu).then(column),
            down: RowParallelLinear::new(hidden, width, bias, residual, device),
        }
    }

    /// Checks that a group of `tp` ranks can share the layer.
    ///
    /// # Errors
    ///
    /// [`Error::Indivisible`] if `tp` does not divide `hidden`.
    pub fn check(hidden: usize, tp: usize) -> Result<(), Error> {
        crate::shard::check_divides("hidden width", hidden, "tp", tp)
    }

    /// `[samples, tokens, width]` for the same.
    pub fn forward(&self, x: Tensor<3>, group: &TensorParallel) -> Tensor<3> {
        let x = group.enter(x);
        let hidden = match &self.gate {
            None => activation::gelu(self.up.forward(x, group)),
            Some(gate) => {
                activation::silu(gate.forward(x.clone(), group)) * self.up.forward(x, group)
            }
        };
        self.down.forward(hidden, group)
    }

    /// How the parameters are cut.
    pub fn shard_specs(&self) -> Vec<(String, ShardSpec)> {
        let mut specs = nested("up", self.up.shard_specs());
        if let Some(gate) = &self.gate {
            specs.extend(nested("gate", gate.shard_specs()));
        }
        specs.extend(nested("down", self.down.shard_specs()));
        specs
    }
}
