//! What all MPI communicators of a process share: the library, the failure, and the notices by which ranks tell each other about it.

use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::mpi::Threading;
use ::mpi::environment::Universe;
use serde::{Deserialize, Serialize};

use super::link::{Link, Transfer};
use crate::communicator::CollectiveCall;
use crate::error::{Error, Loss};

/// Tag of notices.
const NOTICE: i32 = 1;

/// How long a failed rank stays for the others to hear of it before its process may end (which makes `mpirun` end theirs).
const FAREWELL: Duration = Duration::from_secs(2);

/// How much later than a rank's farewell its last messages may arrive.
const STRAGGLERS: Duration = Duration::from_millis(200);

/// The ranks of the job.
#[derive(Debug)]
pub(super) struct World {
    /// Some until the end.
    universe: Option<Library>,
    /// For notices only. Some until the end: a communicator has to be freed before MPI is finalised.
    notices: Option<Link>,
    rank: usize,
    size: usize,
    pub(super) timeout: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    failure: Option<Error>,
    /// When each rank said farewell.
    left: Vec<Option<Instant>>,
    /// Notices on their way.
    outgoing: Vec<Transfer>,
}

/// The initialised library; dropping it finalises MPI.
struct Library(#[expect(dead_code, reason = "held for its drop")] Universe);

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Library")
    }
}

/// What ranks tell each other beside the collectives.
#[derive(Debug, Serialize, Deserialize)]
enum Notice {
    Failed(Failure),
    Left,
}

/// The errors that end a world, in a form that can travel.
#[derive(Debug, Serialize, Deserialize)]
enum Failure {
    RankLost {
        rank: usize,
        loss: Loss,
        noticed: String,
    },
    Aborted {
        rank: usize,
        reason: String,
    },
    CollectiveMismatch {
        sequence: u64,
        rank: usize,
        got: CollectiveCall,
        expected_rank: usize,
        expected: CollectiveCall,
    },
    Timeout {
        rank: usize,
        missing: Vec<usize>,
        operation: String,
        timeout: Duration,
    },
    RankOutOfRange {
        rank: usize,
        got: usize,
        size: usize,
        operation: String,
    },
}

impl World {
    /// Initialises MPI.
    pub(super) fn start(timeout: Duration) -> Result<(Self, Link), Error> {
        let invalid = |problem: String| Error::Invalid {
            what: "MPI",
            problem,
        };
        let (universe, threading) = ::mpi::initialize_with_threading(Threading::Multiple)
            .ok_or_else(|| invalid("already initialised, expected one world per process".into()))?;
        if threading != Threading::Multiple {
            return Err(invalid(format!(
                "the library offers {threading:?}, expected MPI_THREAD_MULTIPLE"
            )));
        }
        let link = Link::new(universe.world());
        let notices = link.duplicate();
        let state = State {
            failure: None,
            left: vec![None; link.size()],
            outgoing: Vec::new(),
        };
        let (rank, size) = (link.rank(), link.size());
        let world = Self {
            universe: Some(Library(universe)),
            notices: Some(notices),
            rank,
            size,
            timeout,
            state: Mutex::new(state),
        };
        Ok((world, link))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the world has failed, without a look at new notices.
    pub(super) fn has_failed(&self) -> bool {
        self.lock().failure.is_some()
    }

    /// Reads the notices that have come, and returns the failure if there is one.
    pub(super) fn check(&self) -> Result<(), Error> {
        let mut state = self.lock();
        self.read_notices(&mut state);
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// The first of `ranks` that has left long enough ago for its last messages to be here.
    pub(super) fn lost(&self, ranks: &[usize]) -> Option<usize> {
        let state = self.lock();
        ranks
            .iter()
            .copied()
            .find(|rank| state.left[*rank].is_some_and(|at| at.elapsed() > STRAGGLERS))
    }

    /// Records a failure and tells all ranks; returns the failure that counts.
    pub(super) fn fail(&self, error: &Error) -> Error {
        let mut state = self.lock();
        self.read_notices(&mut state);
        if let Some(first) = &state.failure {
            return first.clone();
        }
        // What cannot travel as it is does so as an abort, here too: all ranks see the same.
        let failure = Failure::of(error, self.rank);
        let error = failure.to_error();
        state.failure = Some(error.clone());
        self.tell(&mut state, &Notice::Failed(failure));
        error
    }

    fn tell(&self, state: &mut State, notice: &Notice) {
        let Some(link) = &self.notices else { return };
        let bytes = serde_json::to_vec(notice).unwrap_or_default();
        for rank in (0..self.size).filter(|rank| *rank != self.rank) {
            state
                .outgoing
                .push(link.send(rank, NOTICE, bytes.clone().into()));
        }
    }

    fn read_notices(&self, state: &mut State) {
        state.outgoing.retain_mut(|transfer| !transfer.poll());
        let Some(link) = &self.notices else { return };
        while let Some((from, length)) = link.probe(None, NOTICE) {
            let mut transfer = link.receive(from, NOTICE, vec![0; length].into());
            // The message is here: this ends at once.
            while !transfer.poll() {
                thread::yield_now();
            }
            let bytes = transfer.into_buffer().unwrap_or_default();
            match serde_json::from_slice(&bytes) {
                Ok(Notice::Failed(failure)) => {
                    state.failure.get_or_insert_with(|| failure.to_error());
                }
                Ok(Notice::Left) => state.left[from] = Some(Instant::now()),
                Err(_) => {}
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let everybody_left = {
            let mut state = self.lock();
            self.tell(&mut state, &Notice::Left);
            self.read_notices(&mut state);
            let somebody_stays = |state: &State| {
                (0..self.size).any(|rank| rank != self.rank && state.left[rank].is_none())
            };
            // After a failure the process stays until the others know; otherwise finalising has to wait for them, and here there is a limit.
            let start = Instant::now();
            let patience = |state: &State| {
                if state.failure.is_some() {
                    FAREWELL.min(self.timeout)
                } else {
                    self.timeout
                }
            };
            while (somebody_stays(&state) || !state.outgoing.is_empty())
                && start.elapsed() < patience(&state)
            {
                thread::sleep(Duration::from_micros(200));
                self.read_notices(&mut state);
            }
            state.failure.is_none() && !somebody_stays(&state)
        };
        if everybody_left {
            drop(self.notices.take());
            drop(self.universe.take());
        } else {
            // Finalising would wait for a rank that may be dead: the process ends without.
            mem::forget((self.notices.take(), self.universe.take()));
        }
    }
}

impl Failure {
    fn of(error: &Error, rank: usize) -> Self {
        match error.clone() {
            Error::RankLost {
                rank,
                loss,
                noticed,
            } => Self::RankLost {
                rank,
                loss,
                noticed,
            },
            Error::Aborted { rank, reason } => Self::Aborted { rank, reason },
            Error::CollectiveMismatch {
                sequence,
                rank,
                got,
                expected_rank,
                expected,
            } => Self::CollectiveMismatch {
                sequence,
                rank,
                got,
                expected_rank,
                expected,
            },
            Error::Timeout {
                rank,
                missing,
                operation,
                timeout,
            } => Self::Timeout {
                rank,
                missing,
                operation,
                timeout,
            },
            Error::RankOutOfRange {
                rank,
                got,
                size,
                operation,
            } => Self::RankOutOfRange {
                rank,
                got,
                size,
                operation,
            },
            other => Self::Aborted {
                rank,
                reason: other.to_string(),
            },
        }
    }

    fn to_error(&self) -> Error {
        match self {
            Self::RankLost {
                rank,
                loss,
                noticed,
            } => Error::RankLost {
                rank: *rank,
                loss: *loss,
                noticed: noticed.clone(),
            },
            Self::Aborted { rank, reason } => Error::Aborted {
                rank: *rank,
                reason: reason.clone(),
            },
            Self::CollectiveMismatch {
                sequence,
                rank,
                got,
                expected_rank,
                expected,
            } => Error::CollectiveMismatch {
                sequence: *sequence,
                rank: *rank,
                got: *got,
                expected_rank: *expected_rank,
                expected: *expected,
            },
            Self::Timeout {
                rank,
                missing,
                operation,
                timeout,
            } => Error::Timeout {
                rank: *rank,
                missing: missing.clone(),
                operation: operation.clone(),
                timeout: *timeout,
            },
            Self::RankOutOfRange {
                rank,
                got,
                size,
                operation,
            } => Error::RankOutOfRange {
                rank: *rank,
                got: *got,
                size: *size,
                operation: operation.clone(),
            },
        }
    }
}
