//! Pipeline parallelism: a model cut into stages, through which micro-batches pass.
//!
//! - A [`Schedule`] is data: which task each rank does after which. It is [checked](Schedule::check) to be complete and free of
//!   deadlock before it runs, and [timed](Schedule::timing) without running.
//! - [`run`] executes one rank's part of a schedule over any [`Communicator`](crate::Communicator): it moves the messages, a
//!   [`StageTasks`] computes.
//! - A [`StageModule`] is what a stage computes: a Burn module that turns an [`Activation`] into another. [`Sequential`] makes one
//!   out of blocks.
//!
//! # Notation
//!
//! `p` stages (ranks), `v` chunks of the model per rank, `m` micro-batches. Chunk `c` of rank `s` is position `c p + s` of
//! the model: a micro-batch visits the ranks `v` times. `F`, `B` and `W` are the times of one chunk's forward pass, of its backward pass for the input, and of that for the
//! weights; without a split the backward pass takes `B + W`.
//!
//! | schedule | bubble of a rank | micro-batches in flight on rank `s` |
//! |---|---|---|
//! | [`gpipe`](Schedule::gpipe) | `(p - 1) (F + B + W)` | `m` |
//! | [`one_forward_one_backward`](Schedule::one_forward_one_backward) | `(p - 1) (F + B + W)` | `min(p - s, m)` |
//! | [`interleaved`](Schedule::interleaved) | `(p - 1) (F + B + W)`, where `F` is `1 / v` of the above | at most `min(2 (p - s - 1) + (v - 1) p + 1, m v)` chunks, for `p` dividing `m` |
//! | [`zero_bubble_h1`](Schedule::zero_bubble_h1) | `(p - 1) (F + B - W)` | at most `min(p, m)` |
//!
//! Sources: `GPipe` (Huang et al. 2019); `PipeDream`-flush, which Megatron-LM calls 1F1B (Narayanan et al. 2021, sections 2.2.1 and
//! 2.2.2, with the interleaved schedule); zero bubble (Qi et al. 2023, section 2.2).

mod check;
mod generate;
mod run;
mod schedule;
mod stage;
mod timing;

pub use check::ScheduleProblem;
pub use run::{Message, StageTasks, TaskTiming, run};
pub use schedule::{Pass, Schedule, Task};
pub use stage::{Activation, Sequential, StageContext, StageModule};
pub(crate) use stage::{flat, host_values};
pub use timing::ScheduleTiming;
