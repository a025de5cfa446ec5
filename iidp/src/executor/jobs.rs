//! Hands micro-batches to a rank's workers and takes their answers in order.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use burn::module::Module;

use crate::Error;
use crate::worker::{Answer, Job, Piece, VirtualWorker, WorkerReply};

/// What becomes known of a micro-batch, in this order.
pub(super) enum News {
    /// A part of its gradient; only of jobs that stream.
    Piece(Piece),
    /// The rest.
    Answer(Answer),
}

/// Gives the jobs to the workers in turn and hands the answers on in the order of the jobs, whatever the order in which
/// they come.
///
/// A worker is at most one job ahead of what was handed on, so that at most two gradients per worker exist. After a
/// failed job the jobs that have not been given out are left undone.
pub(super) fn run_jobs<M: Module + 'static>(
    workers: &[VirtualWorker<M>],
    replies: &Receiver<WorkerReply>,
    jobs: Vec<Job<M>>,
    timeout: Duration,
    rank: usize,
    mut hand_on: impl FnMut(News) -> Result<(), Error>,
) -> Result<(), Error> {
    let order: Vec<usize> = jobs.iter().map(|job| job.micro_batch).collect();
    let mut waiting = jobs.into_iter().enumerate();
    let mut submitted = 0;
    let mut early: BTreeMap<usize, Answer> = BTreeMap::new();
    let mut pieces: BTreeMap<usize, Vec<Piece>> = BTreeMap::new();
    let mut failed = false;
    for (handed_on, &next) in order.iter().enumerate() {
        while !failed && submitted < handed_on + 2 * workers.len() {
            let Some((index, job)) = waiting.next() else {
                break;
            };
            if !workers[index % workers.len()].submit(job) {
                return Err(Error::WorkerGone {
                    rank,
                    worker: index % workers.len(),
                });
            }
            submitted += 1;
        }
        if handed_on >= submitted {
            break;
        }
        let answer = loop {
            for piece in pieces.remove(&next).unwrap_or_default() {
                hand_on(News::Piece(piece))?;
            }
            if let Some(answer) = early.remove(&next) {
                break answer;
            }
            match replies.recv_timeout(timeout) {
                Ok(WorkerReply::Piece(piece)) => {
                    pieces.entry(piece.micro_batch).or_default().push(piece)
                }
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
                    return Err(Error::WorkerGone {
                        rank,
                        worker: handed_on % workers.len(),
                    });
                }
            }
        };
        failed |= answer.result.is_err();
        hand_on(News::Answer(answer))?;
    }
    Ok(())
}
