//! Observers: whoever wants to see a run while it goes on.
//!
//! The trainer emits [`Event`]s from its own thread, in order; an observer that fails ends the run with its error, since
//! a log that silently lost lines would be worse than none.

mod jsonl;
mod progress;
pub mod report;

pub use jsonl::JsonLines;
pub use progress::ProgressDisplay;

use crate::error::Error;
use crate::record::{DecisionRecord, StepRecord, TrainingReport, ValidationRecord};
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// Something that happened in a run.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event<'a> {
    /// The run begins.
    Started {
        /// The run's name.
        name: &'a str,
        /// Samples that the run will consume.
        samples: u64,
        /// One line per rank.
        devices: &'a [String],
    },
    /// A step is done.
    Step(&'a StepRecord),
    /// A validation pass is done.
    Validation(&'a ValidationRecord),
    /// The controller decided.
    Decision(&'a DecisionRecord),
    /// The run is over.
    #[serde(skip)]
    Finished(&'a TrainingReport),
}

/// Receives the events of a run.
pub trait Observer: Send {
    /// Called for every event, in order.
    ///
    /// # Errors
    /// An error ends the run and is returned from it.
    fn observe(&mut self, event: &Event<'_>) -> Result<(), Error>;
}

/// The observers of a run, called in the order in which they were added.
#[derive(Default)]
pub struct Observers(Vec<Box<dyn Observer>>);

impl Observers {
    /// No observer.
    pub fn none() -> Self {
        Self::default()
    }

    /// The usual ones: a progress bar on the terminal, and `events.jsonl` and `report.html` in `directory` (created if missing).
    ///
    /// # Errors
    /// [`Error::Io`] if the directory or the event file cannot be created.
    pub fn standard(directory: impl AsRef<Path>) -> Result<Self, Error> {
        let directory = directory.as_ref();
        std::fs::create_dir_all(directory).map_err(|e| Error::io(directory, e))?;
        Ok(Self::none()
            .with(ProgressDisplay::new())
            .with(JsonLines::create(directory.join("events.jsonl"))?)
            .with(report::HtmlReport::new(directory.join("report.html"))))
    }

    /// Adds one.
    #[must_use]
    pub fn with(mut self, observer: impl Observer + 'static) -> Self {
        self.0.push(Box::new(observer));
        self
    }

    pub(crate) fn emit(&mut self, event: &Event<'_>) -> Result<(), Error> {
        self.0.iter_mut().try_for_each(|o| o.observe(event))
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observers({})", self.0.len())
    }
}
