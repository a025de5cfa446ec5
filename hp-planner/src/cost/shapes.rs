//! What a library's choice of kernels does to single shapes of work.
//!
//! The time of a matrix product does not fall smoothly with its size: the library picks another kernel, tiles fit more or less
//! well. Where the same shape has been measured in several configurations its time per layer is known better than any formula
//! gives it; these factors on the formula's time are such an implied layer profile.

use serde::{Deserialize, Serialize};

use crate::cost::Problem;
use crate::plan::{Configuration, Stage};
use crate::training::{Precision, Recompute};

/// Everything that determines the kernels of one layer on one device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ShapeKey {
    gpu: String,
    hidden: u32,
    heads: u32,
    kv_heads: u32,
    ffn: u32,
    vocab: u32,
    experts: u32,
    seq: u32,
    micro_batch: u32,
    tp: u32,
    cp: u32,
    ep: u32,
    recompute: Recompute,
    precision: Precision,
    flash: bool,
    sequence_parallel: bool,
}

impl ShapeKey {
    /// The shape of a stage's layers; `None` for explicit layers.
    pub fn new(
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
    ) -> Option<Self> {
        let shape = problem.model.transformer.as_ref()?;
        Some(Self {
            gpu: problem.cluster.groups[stage.group].gpu.clone(),
            hidden: shape.hidden,
            heads: shape.heads,
            kv_heads: shape.kv_heads(),
            ffn: shape.ffn(),
            vocab: shape.vocab,
            experts: shape.experts,
            seq: problem.training.seq,
            micro_batch: configuration.micro_batch,
            tp: stage.tp,
            cp: configuration.dims.cp,
            ep: configuration.dims.ep,
            recompute: configuration.recompute,
            precision: problem.training.precision,
            flash: problem.training.flash_attention,
            sequence_parallel: configuration.sequence_parallel,
        })
    }

    /// What shapes of other micro-batches and lengths share: the widths of the weights, which decide over the kernels most.
    #[must_use]
    pub fn family(&self) -> Self {
        Self {
            seq: 0,
            micro_batch: 0,
            cp: 0,
            ep: 0,
            ..self.clone()
        }
    }
}

/// Factors on the formula's time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ShapeFactors {
    /// On the blocks, their collectives included.
    pub block: f64,
    /// On embedding and head.
    pub ends: f64,
}

impl ShapeFactors {
    /// Both factors one after the other.
    #[must_use]
    pub fn times(self, other: Self) -> Self {
        Self {
            block: self.block * other.block,
            ends: self.ends * other.ends,
        }
    }
}

impl Default for ShapeFactors {
    fn default() -> Self {
        Self {
            block: 1.0,
            ends: 1.0,
        }
    }
}

/// Factors by shape.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ShapeTable {
    /// Sorted by key.
    entries: Vec<(ShapeKey, ShapeFactors)>,
}

impl ShapeTable {
    /// A table of the given entries; of equal keys the first counts.
    pub fn new(mut entries: Vec<(ShapeKey, ShapeFactors)>) -> Self {
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        entries.dedup_by(|later, earlier| later.0 == earlier.0);
        Self { entries }
    }

    /// Whether no shape is known.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of shapes.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Factors of a shape: those of its [family](ShapeKey::family) times its own, as far as they are known. Computes in O(log n).
    pub fn factors(&self, key: &ShapeKey) -> ShapeFactors {
        let of = |key: &ShapeKey| self.get(key).unwrap_or_default();
        of(&key.family()).times(of(key))
    }

    /// The entry of a key. Computes in O(log n).
    pub fn get(&self, key: &ShapeKey) -> Option<ShapeFactors> {
        self.entries
            .binary_search_by(|(known, _)| known.cmp(key))
            .ok()
            .map(|index| self.entries[index].1)
    }

    /// All shapes with their factors.
    pub fn iter(&self) -> std::slice::Iter<'_, (ShapeKey, ShapeFactors)> {
        self.entries.iter()
    }
}

impl<'a> IntoIterator for &'a ShapeTable {
    type Item = &'a (ShapeKey, ShapeFactors);
    type IntoIter = std::slice::Iter<'a, (ShapeKey, ShapeFactors)>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
