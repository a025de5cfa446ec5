//! Hands micro-batches to a rank's workers and takes their answers in order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use burn::module::Module;

use crate::Error;
use crate::worker::{Answer, Job, Piece, VirtualWorker, WorkerReply};

/// What becomes known of a micro-batch, in this order.
pub(super) enum News {
    /// A part of its gradient, as soon as it comes; only of jobs that stream.
    Piece(Piece),
    /// The rest.
    Answer(Answer),
}

/// What a worker computes together.
pub(super) struct Round<M> {
    worker: usize,
    jobs: Vec<Job<M>>,
}

/// Jobs in the order of their micro-batches, cut into rounds.
///
/// Job i goes to worker `i % workers`. The last `depth` jobs of each worker are one round, every other job is a round of its own.
pub(super) fn rounds<M>(mut jobs: Vec<Job<M>>, workers: usize, depth: usize) -> Vec<Round<M>> {
    let tail = jobs.len().saturating_sub(workers * depth);
    let last = jobs.split_off(tail);
    let alone = |(index, job)| Round {
        worker: index % workers,
        jobs: vec![job],
    };
    let mut rounds: Vec<_> = jobs.into_iter().enumerate().map(alone).collect();
    for (index, job) in last.into_iter().enumerate() {
        if index < workers {
            rounds.push(alone((tail + index, job)));
        } else {
            rounds[tail + index % workers].jobs.push(job);
        }
    }
    rounds
}

/// Gives the rounds to the workers and hands the answers on in the order of their micro-batches, whatever the order in which
/// they come.
///
/// A worker has at most two rounds that were not handed on, which bounds the gradients that exist. After a failed job the rounds that have
/// not been given out are left undone.
pub(super) fn run_jobs<M: Module + 'static>(
    workers: &[VirtualWorker<M>],
    replies: &Receiver<WorkerReply>,
    rounds: Vec<Round<M>>,
    timeout: Duration,
    rank: usize,
    mut hand_on: impl FnMut(News) -> Result<(), Error>,
) -> Result<(), Error> {
    let order: BTreeSet<usize> = rounds
        .iter()
        .flat_map(|round| round.jobs.iter().map(|job| job.micro_batch))
        .collect();
    let ends: BTreeSet<usize> = rounds
        .iter()
        .filter_map(|round| Some(round.jobs.last()?.micro_batch))
        .collect();
    let mut waiting = rounds.into_iter();
    let mut given = BTreeSet::new();
    let mut under_way = 0;
    let mut early: BTreeMap<usize, Answer> = BTreeMap::new();
    let mut failed = false;
    for next in order {
        while !failed && (under_way < 2 * workers.len() || !given.contains(&next)) {
            let Some(Round { worker, jobs }) = waiting.next() else {
                break;
            };
            given.extend(jobs.iter().map(|job| job.micro_batch));
            if !workers[worker].submit(jobs) {
                return Err(Error::WorkerGone { rank, worker });
            }
            under_way += 1;
        }
        if !given.contains(&next) {
            continue;
        }
        let answer = loop {
            if let Some(answer) = early.remove(&next) {
                break answer;
            }
            match replies.recv_timeout(timeout) {
                Ok(WorkerReply::Piece(piece)) => hand_on(News::Piece(piece))?,
                Ok(WorkerReply::Answer(answer)) => {
                    early.insert(answer.micro_batch, answer);
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Error::WorkerTimeout {
                        rank,
                        micro_batch: next,
                        timeout,
                    });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::WorkerGone { rank, worker: 0 });
                }
            }
        };
        under_way -= usize::from(ends.contains(&next));
        failed |= answer.result.is_err();
        hand_on(News::Answer(answer))?;
    }
    Ok(())
}
