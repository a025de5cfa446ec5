//! The few physical constants of the cost model that differ between machines and frameworks.

use serde::{Deserialize, Serialize};

use crate::cluster::GpuType;
use crate::error::Result;

/// What a device and its software stack reach of the data sheet; every constant has physical bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Constants {
    /// Fraction of the peak rate that large matrix products reach.
    pub gemm_efficiency: f64,
    /// Fraction of the memory bandwidth that kernels bound by memory reach.
    pub memory_efficiency: f64,
    /// Efficiency of the fused attention kernel over that of large matrix products.
    pub attention_efficiency: f64,
    /// Least seconds between two kernels.
    pub launch: f64,
    /// Fraction of the bandwidth inside a node that collectives reach.
    pub intra_efficiency: f64,
    /// Fraction of the bandwidth between nodes that collectives reach.
    pub inter_efficiency: f64,
    /// Fraction of the backward pass of the last micro-batch behind which data-parallel reduction can hide.
    pub overlap: f64,
    /// Seconds per iteration that belong to no kernel: data loading, logging, synchronisation.
    pub overhead: f64,
    /// Relative spread between ranks: a synchronisation of n ranks waits for the slowest, `1 + jitter * log2(n)`.
    pub jitter: f64,
    /// Fraction of tensor-parallel communication that runs beside matrix products instead of before them.
    pub tensor_overlap: f64,
    /// Fraction of the forward pass that full recomputation repeats: less than 1 where parts of a block are exempt.
    pub recompute: f64,
    /// Exponential of one score in fused attention, in columns of head width that the matrix units pass in the same time. Shah
    /// et al. 2024 (`FlashAttention-3`), section 3.2, count 64 on H100 if nothing overlaps.
    pub softmax: f64,
    /// Latency of links in fact over that of the data sheet.
    pub latency: f64,
    /// Efficiency of 8-bit and 4-bit matrix products over that of 16-bit ones: operands are scaled and converted first.
    pub narrow_efficiency: f64,
    /// Efficiency of the experts' grouped matrix products over that of plain ones.
    pub expert_efficiency: f64,
}

/// Least and greatest physical value of one constant, and how far it is expected from its default.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// Name of the constant.
    pub name: &'static str,
    /// Least value.
    pub least: f64,
    /// Greatest value.
    pub most: f64,
    /// Standard deviation of the prior around the default.
    pub deviation: f64,
}

/// Number of constants.
pub const COUNT: usize = 15;

/// The bounds, in the order of [`Constants::to_array`].
pub const BOUNDS: [Bound; COUNT] = [
    bound("gemm_efficiency", 0.1, 1.0, 0.15),
    bound("memory_efficiency", 0.2, 1.0, 0.2),
    bound("attention_efficiency", 0.1, 1.5, 0.3),
    bound("launch", 0.0, 1e-4, 5e-06),
    bound("intra_efficiency", 0.1, 1.0, 0.25),
    bound("inter_efficiency", 0.05, 1.0, 0.25),
    bound("overlap", 0.0, 1.0, 0.3),
    bound("overhead", 0.0, 2.0, 0.02),
    bound("jitter", 0.0, 0.05, 0.01),
    bound("tensor_overlap", 0.0, 0.95, 0.3),
    bound("recompute", 0.0, 1.0, 0.2),
    bound("softmax", 0.0, 128.0, 20.0),
    bound("latency", 0.1, 10.0, 0.5),
    bound("narrow_efficiency", 0.3, 1.0, 0.15),
    bound("expert_efficiency", 0.2, 1.0, 0.2),
];

pub(crate) const fn bound(name: &'static str, least: f64, most: f64, deviation: f64) -> Bound {
    Bound {
        name,
        least,
        most,
        deviation,
    }
}

impl Constants {
    /// The catalogue's constants of a GPU type, and typical values for the rest.
    pub fn of(gpu: &GpuType) -> Self {
        Self {
            gemm_efficiency: gpu.compute_efficiency,
            memory_efficiency: gpu.memory_efficiency,
            attention_efficiency: 0.8,
            launch: gpu.launch_us * 1e-6,
            intra_efficiency: 0.8,
            inter_efficiency: 0.8,
            overlap: 0.8,
            overhead: 0.0,
            jitter: 0.0,
            tensor_overlap: 0.0,
            recompute: 1.0,
            softmax: 20.0,
            latency: 1.0,
            narrow_efficiency: 0.8,
            expert_efficiency: 0.7,
        }
    }

    /// The constants as numbers, in the order of [`BOUNDS`].
    pub const fn to_array(&self) -> [f64; COUNT] {
        [
            self.gemm_efficiency,
            self.memory_efficiency,
            self.attention_efficiency,
            self.launch,
            self.intra_efficiency,
            self.inter_efficiency,
            self.overlap,
            self.overhead,
            self.jitter,
            self.tensor_overlap,
            self.recompute,
            self.softmax,
            self.latency,
            self.narrow_efficiency,
            self.expert_efficiency,
        ]
    }

    /// The inverse of [`to_array`](Self::to_array); values are clamped to their bounds.
    pub fn from_array(values: [f64; COUNT]) -> Self {
        let mut clamped = values;
        for (value, bound) in clamped.iter_mut().zip(&BOUNDS) {
            *value = value.clamp(bound.least, bound.most);
        }
        let [
            gemm_efficiency,
            memory_efficiency,
            attention_efficiency,
            launch,
            intra_efficiency,
            inter_efficiency,
            overlap,
            overhead,
            jitter,
            tensor_overlap,
            recompute,
            softmax,
            latency,
            narrow_efficiency,
            expert_efficiency,
        ] = clamped;
        Self {
            gemm_efficiency,
            memory_efficiency,
            attention_efficiency,
            launch,
            intra_efficiency,
            inter_efficiency,
            overlap,
            overhead,
            jitter,
            tensor_overlap,
            recompute,
            softmax,
            latency,
            narrow_efficiency,
            expert_efficiency,
        }
    }

    /// Checks that every constant is within its bounds.
    ///
    /// # Errors
    /// [`Error::Field`](crate::Error::Field) for the first that is not.
    pub fn validate(&self) -> Result<()> {
        for (value, bound) in self.to_array().into_iter().zip(&BOUNDS) {
            crate::cluster::positive(bound.name, value, bound.least, bound.most, "")?;
        }
        Ok(())
    }
}
