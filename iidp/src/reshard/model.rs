//! The whole model's tensors, as no layout owns them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Error, ShardSpec};

/// One tensor of the whole model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Canonical name: the path in the whole model, such as `blocks.3.qkv.weight`, whichever stage holds it.
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// How tensor-parallel ranks share it.
    pub shard: ShardSpec,
    /// The blocks that use it, by index: one, or several for a tied tensor. A stage that holds any of them holds the tensor.
    pub blocks: Vec<usize>,
    /// Whether it is trained, and so has moments. Others are buffers: frozen weights, running statistics.
    pub trainable: bool,
}

impl TensorSpec {
    /// A trainable tensor of block `block`.
    pub fn new(
        name: impl Into<String>,
        shape: impl Into<Vec<usize>>,
        shard: ShardSpec,
        block: usize,
    ) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            shard,
            blocks: vec![block],
            trainable: true,
        }
    }

    /// The tensor is used by `block` too.
    #[must_use]
    pub fn tied_to(mut self, block: usize) -> Self {
        self.blocks.push(block);
        self
    }

    /// The tensor is not trained.
    #[must_use]
    pub fn buffer(mut self) -> Self {
        self.trainable = false;
        self
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Rows and columns of the matrix that a [`Region`](super::Region) is a part of.
    pub(super) fn matrix(&self) -> (usize, usize) {
        let dim = self.shard.dim().unwrap_or(0).min(self.shape.len());
        (
            self.shape[..dim].iter().product(),
            self.shape[dim..].iter().product(),
        )
    }

    /// Columns per index of the split dimension; all of them where nothing is split.
    pub(super) fn columns_per_index(&self) -> usize {
        self.shard.dim().map_or_else(
            || self.elements(),
            |dim| self.shape.iter().skip(dim + 1).product(),
        )
    }

    /// Length of the split dimension; 1 where nothing is split.
    pub(super) fn extent(&self) -> usize {
        self.shard
            .dim()
            .map_or(1, |dim| self.shape.get(dim).copied().unwrap_or(0))
    }
}

/// The tensors of a model and what an optimizer keeps for each: what two layouts must have in common to move state from one to the other.
///
/// # Examples
///
/// ```
/// use iidp::ShardSpec;
/// use iidp::reshard::{ModelSpec, TensorSpec};
///
/// let model = ModelSpec::new(
///     vec![
///         TensorSpec::new("tokens.weight", [100, 8], ShardSpec::split(0), 0).tied_to(2),
///         TensorSpec::new("blocks.0.up.weight", [8, 32], ShardSpec::split(1), 1),
///         TensorSpec::new("norm.gamma", [8], ShardSpec::Replicated, 2),
///     ],
///     ["moment_1", "moment_2"],
/// )?;
/// assert_eq!(model.blocks(), 3);
/// assert_eq!(model.elements(), 100 * 8 + 8 * 32 + 8);
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelSpec {
    tensors: Vec<TensorSpec>,
    moments: Vec<String>,
    blocks: usize,
}

impl ModelSpec {
    /// A model of `tensors`, in the order in which a rank keeps them in its flat buffers, whose optimizer keeps `moments` (such as
    /// `moment_1`), one element per trained element each.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name given twice, a tensor without blocks, a split of a dimension that a tensor does not have, or no tensors.
    pub fn new<S: Into<String>>(
        tensors: Vec<TensorSpec>,
        moments: impl IntoIterator<Item = S>,
    ) -> Result<Self, Error> {
        let invalid = |problem: String| Error::Invalid {
            what: "model specification",
            problem,
        };
        if tensors.is_empty() {
            return Err(invalid("0 tensors, expected at least 1".into()));
        }
        let mut names = BTreeMap::new();
        for (index, tensor) in tensors.iter().enumerate() {
            if names.insert(tensor.name.as_str(), index).is_some() {
                return Err(invalid(format!("tensor {} is given twice", tensor.name)));
            }
            if tensor.blocks.is_empty() {
                return Err(invalid(format!("tensor {} is in no block", tensor.name)));
            }
            // One rank's part is the whole: this checks the dimension and the sections.
            tensor
                .shard
                .ranges(&tensor.shape, 1, 0)
                .map_err(|error| invalid(format!("tensor {}: {error}", tensor.name)))?;
        }
        let mut moments: Vec<String> = moments.into_iter().map(Into::into).collect();
        moments.sort_unstable();
        let twice = moments.array_windows().find(|[one, next]| one == next);
        if let Some([twice, _]) = twice {
            return Err(invalid(format!("moment {twice} is given twice")));
        }
        let blocks = tensors
            .iter()
            .flat_map(|tensor| &tensor.blocks)
            .max()
            .map_or(0, |last| last + 1);
        Ok(Self {
            tensors,
            moments,
            blocks,
        })
    }

    /// The tensors, in the order of the flat buffers.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Names of the moments, sorted.
    pub fn moments(&self) -> &[String] {
        &self.moments
    }

    /// Number of blocks: one more than the greatest index.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Elements of all tensors, trained or not.
    pub fn elements(&self) -> usize {
        self.tensors.iter().map(TensorSpec::elements).sum()
    }

    /// Position of the tensor of this name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.name == name)
    }
}
