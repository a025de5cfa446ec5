//! Moving a model's state from one layout to another: parameters, running statistics, optimizer moments and step counts.
//!
//! - A [`ModelSpec`] names the tensors of the whole model, their shapes and how they are split.
//! - A [`StateLayout`] says which rank holds which part of them: a mesh of replicas, stages and tensor-parallel ranks with any assignment of blocks to
//!   stages, moments sharded over the replicas or not; or any ranges at all.
//! - A [`ReshardPlan`] lists what has to move between two layouts of one model, and nothing more.
//! - [`ReshardPlan::apply`] moves it among ranks that communicate, [`ReshardPlan::apply_in_process`] where one process holds all ranks' states. Both read the old [`RankState`]s and make new ones, so
//!   a failure leaves the run where it was.
//!
//! Values are copied, never computed with: they arrive bit for bit.
//!
//! Sources: Tenplex (Wagenländer et al., SOSP 2024, section 4: a reconfiguration as splits, moves and merges of parts of a
//! tensor collection) and universal checkpointing (Lian et al. 2024: a canonical form between layouts). Here no whole tensor is made on the way: a part goes straight from its old place to its new.

mod apply;
mod layout;
mod model;
mod plan;
mod region;
mod schedule;
mod state;

pub use layout::{Component, Piece, RankLayout, StateLayout};
pub use model::{ModelSpec, TensorSpec};
pub use plan::{Move, ReshardPlan};
pub use region::Region;
pub use state::RankState;
