//! What is to be trained: batch, precision, optimizer, and which kinds of parallelism may be used.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cluster::{count, positive};
use crate::document::{self, Validate};
use crate::error::{Error, Result};

/// Number format of the matrix products.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// 32-bit floating point.
    Fp32,
    /// TensorFloat-32 products on 32-bit data.
    Tf32,
    /// 16-bit floating point with 32-bit master weights.
    Fp16,
    /// bfloat16 with 32-bit master weights.
    #[default]
    Bf16,
    /// 8-bit products on 16-bit data.
    Fp8,
    /// 4-bit products on 16-bit data.
    Fp4,
}

impl Precision {
    /// Bytes of one parameter or activation as stored between kernels.
    pub const fn bytes(self) -> f64 {
        match self {
            Self::Fp32 | Self::Tf32 => 4.0,
            Self::Fp16 | Self::Bf16 | Self::Fp8 | Self::Fp4 => 2.0,
        }
    }

    /// Whether parameters are kept a second time in 32 bits by the optimizer.
    pub const fn has_master_weights(self) -> bool {
        !matches!(self, Self::Fp32 | Self::Tf32)
    }
}

/// The optimizer, as far as memory and update time depend on it.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Optimizer {
    /// Plain stochastic gradient descent, no state.
    Sgd,
    /// Gradient descent with momentum: 4 bytes per parameter.
    Momentum,
    /// Adam or `AdamW`: two moments, 8 bytes per parameter.
    #[default]
    Adam,
}

impl Optimizer {
    /// Bytes of optimizer state per parameter, without master weights.
    pub const fn state_bytes(self) -> f64 {
        match self {
            Self::Sgd => 0.0,
            Self::Momentum => 4.0,
            Self::Adam => 8.0,
        }
    }
}

/// Which activations are recomputed in the backward pass.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Recompute {
    /// All activations are kept.
    #[default]
    None,
    /// The attention core is recomputed (Korthikanti et al. 2022, section 5).
    Selective,
    /// Only the layer inputs are kept.
    Full,
}

/// Order of forward and backward passes in a pipeline.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward; interleaved when there is more than one chunk per stage (Narayanan et al. 2021).
    #[default]
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// Zero-bubble schedule with the activation memory of 1F1B (Qi et al. 2024, ZB-H1).
    ZbH1,
    /// Zero-bubble schedule with twice that memory (Qi et al. 2024, ZB-2P).
    #[serde(rename = "zb-2p")]
    Zb2p,
    /// Zero-bubble schedule with two chunks per stage laid out as a V (Qi et al. 2024, ZB-V).
    ZbV,
}

/// One step of a forecast of the global batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchInterval {
    /// Samples trained with this batch.
    pub samples: u64,
    /// Samples per optimizer step.
    pub global_batch: u64,
}

/// What is to be trained and what may be chosen.
#[allow(
    clippy::struct_excessive_bools,
    reason = "independent yes-or-no properties, each a field of the input file"
)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingSpec {
    /// Samples per optimizer step; a file has to state it.
    #[serde(default)]
    pub global_batch: u64,
    /// Tokens per sample; 1 for models that are not sequence models.
    pub seq: u32,
    /// Samples per micro-batch that may be chosen; empty means the powers of two up to the global batch.
    pub micro_batches: Vec<u32>,
    /// Number format.
    pub precision: Precision,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Recompute choices allowed.
    pub recompute: Vec<Recompute>,
    /// `ZeRO` stages allowed, each 0 to 3.
    pub zero: Vec<u8>,
    /// Pipeline schedules allowed.
    pub schedules: Vec<Schedule>,
    /// Whether activations outside the tensor-parallel regions are split over the sequence (Korthikanti et al. 2022).
    pub sequence_parallel: bool,
    /// Whether attention runs as one fused kernel that never stores the score matrix.
    pub flash_attention: bool,
    /// Whether data-parallel reduction overlaps with the backward pass.
    pub overlap_reduce: bool,
    /// Bytes per gradient element on the wire and in the accumulator; 0 means 4 with master weights in pipelines, else that of the precision.
    pub gradient_bytes: u32,
    /// Greatest number of virtual workers per GPU.
    pub max_virtual_workers: u32,
    /// Greatest tensor-parallel degree; 0 means that of a node.
    pub max_tp: u32,
    /// Greatest pipeline depth; 0 means the number of layers.
    pub max_pp: u32,
    /// Greatest number of model chunks per pipeline stage.
    pub max_vpp: u32,
    /// Greatest context-parallel degree.
    pub max_cp: u32,
    /// Greatest expert-parallel degree; 0 means the number of experts.
    pub max_ep: u32,
    /// Fraction of device memory left free for fragmentation and the framework, 0 to 0.5.
    pub memory_margin: f64,
    /// Samples of the whole job; 0 if only the iteration is of interest.
    pub samples: u64,
    /// Forecast of the global batch over the job, in order; empty means constant.
    pub trajectory: Vec<BatchInterval>,
}

impl Default for TrainingSpec {
    fn default() -> Self {
        Self {
            global_batch: 1,
            seq: 1,
            micro_batches: Vec::new(),
            precision: Precision::Bf16,
            optimizer: Optimizer::Adam,
            recompute: vec![Recompute::None],
            zero: vec![0],
            schedules: vec![Schedule::OneFOneB],
            sequence_parallel: false,
            flash_attention: true,
            overlap_reduce: true,
            gradient_bytes: 0,
            max_virtual_workers: 1,
            max_tp: 0,
            max_pp: 0,
            max_vpp: 1,
            max_cp: 1,
            max_ep: 0,
            memory_margin: 0.05,
            samples: 0,
            trajectory: Vec::new(),
        }
    }
}

impl TrainingSpec {
    /// A specification with this global batch (samples) and sequence length (tokens), and defaults for the rest.
    pub fn new(global_batch: u64, seq: u32) -> Self {
        Self {
            global_batch,
            seq,
            ..Self::default()
        }
    }

    /// Data parallelism only: no tensor, pipeline, context or expert parallelism, the given micro-batch.
    #[must_use]
    pub fn data_parallel(mut self, micro_batch: u32) -> Self {
        self.micro_batches = vec![micro_batch];
        self.max_tp = 1;
        self.max_pp = 1;
        self.max_vpp = 1;
        self.max_cp = 1;
        self.max_ep = 1;
        self
    }

    /// Reads a TOML (or, by its extension, JSON) file.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Syntax`] or [`Error::Field`].
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        document::read(path.as_ref())
    }

    /// Parses a TOML text.
    ///
    /// # Errors
    /// [`Error::Syntax`] or [`Error::Field`].
    pub fn from_toml(text: &str) -> Result<Self> {
        document::parse_toml(text, None)
    }

    /// Parses a JSON text.
    ///
    /// # Errors
    /// [`Error::Syntax`] or [`Error::Field`].
    pub fn from_json(text: &str) -> Result<Self> {
        document::parse_json(text, None)
    }

    /// Micro-batch sizes to try, ascending and distinct, none above the global batch.
    pub fn micro_batch_choices(&self) -> Vec<u32> {
        let mut choices = if self.micro_batches.is_empty() {
            (0..31)
                .map(|power| 1_u32 << power)
                .take_while(|&size| u64::from(size) <= self.global_batch)
                .collect()
        } else {
            self.micro_batches.clone()
        };
        choices.sort_unstable();
        choices.dedup();
        choices.retain(|&size| u64::from(size) <= self.global_batch);
        choices
    }

    /// Bytes of one gradient element as accumulated and reduced.
    pub fn gradient_element_bytes(&self) -> f64 {
        if self.gradient_bytes == 0 {
            self.precision.bytes()
        } else {
            f64::from(self.gradient_bytes)
        }
    }

    /// Bytes of optimizer state per parameter, with the 32-bit master weights where the precision needs them.
    pub fn optimizer_bytes(&self) -> f64 {
        self.optimizer.state_bytes()
            + if self.precision.has_master_weights() {
                4.0
            } else {
                0.0
            }
    }

    /// Checks all fields; the readers have already done so.
    ///
    /// # Errors
    /// [`Error::Field`] for the first field that is not allowed.
    pub fn validate(&self) -> Result<()> {
        if self.global_batch == 0 {
            return Err(Error::field(
                "global_batch",
                "0 or missing",
                format!("a count from 1 to {}", 1_u64 << 40),
            ));
        }
        count("global_batch", self.global_batch, 1, 1 << 40)?;
        count("seq", u64::from(self.seq), 1, 1 << 28)?;
        for (index, &size) in self.micro_batches.iter().enumerate() {
            count(
                &format!("micro_batches[{index}]"),
                u64::from(size),
                1,
                self.global_batch.min(1 << 31),
            )?;
        }
        nonempty("recompute", &self.recompute, "none, selective, full")?;
        nonempty("zero", &self.zero, "stages 0, 1, 2, 3")?;
        nonempty(
            "schedules",
            &self.schedules,
            "gpipe, 1f1b, zb-h1, zb-2p, zb-v",
        )?;
        for (index, &stage) in self.zero.iter().enumerate() {
            count(&format!("zero[{index}]"), u64::from(stage), 0, 3)?;
        }
        if !matches!(self.gradient_bytes, 0 | 2 | 4) {
            return Err(Error::field(
                "gradient_bytes",
                self.gradient_bytes,
                "0, 2 or 4",
            ));
        }
        count(
            "max_virtual_workers",
            u64::from(self.max_virtual_workers),
            1,
            64,
        )?;
        count("max_vpp", u64::from(self.max_vpp), 1, 1024)?;
        count("max_cp", u64::from(self.max_cp), 1, 1024)?;
        positive(
            "memory_margin",
            self.memory_margin,
            0.0,
            0.5,
            "of the device memory",
        )?;
        for (index, interval) in self.trajectory.iter().enumerate() {
            let at = |field: &str| format!("trajectory[{index}].{field}");
            count(&at("samples"), interval.samples, 1, u64::MAX)?;
            count(&at("global_batch"), interval.global_batch, 1, 1 << 40)?;
        }
        Ok(())
    }
}

fn nonempty<T>(field: &str, values: &[T], allowed: &str) -> Result<()> {
    if values.is_empty() {
        Err(Error::field(
            field,
            "empty",
            format!("one or more of {allowed}"),
        ))
    } else {
        Ok(())
    }
}

impl Validate for TrainingSpec {
    fn validate(&self) -> Result<()> {
        Self::validate(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_are_powers_of_two_by_default() {
        assert_eq!(TrainingSpec::new(6, 1).micro_batch_choices(), [1, 2, 4]);
    }

    #[test]
    fn wrong_fields_are_named() {
        let error = TrainingSpec::from_toml("global_batch = 8\nzero = [0, 4]\n").unwrap_err();
        assert_eq!(
            error.to_string(),
            "line 2: field `zero[1]` is 4, allowed is a count from 0 to 3"
        );
    }
}
