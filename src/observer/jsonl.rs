//! One JSON object per event and line.

use super::{Event, Observer};
use crate::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

/// Writes every event as one line of JSON; `jq` and data frames read it directly.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: BufWriter<File>,
}

impl JsonLines {
    /// Creates the file, or empties it.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let path = path.into();
        let file = File::create(&path).map_err(|e| Error::io(&path, e))?;
        Ok(Self {
            path,
            file: BufWriter::new(file),
        })
    }
}

impl Observer for JsonLines {
    fn observe(&mut self, event: &Event<'_>) -> Result<(), Error> {
        if let Event::Finished(_) = event {
            return self.file.flush().map_err(|e| Error::io(&self.path, e));
        }
        let line = serde_json::to_string(event).map_err(|e| Error::io(&self.path, e.into()))?;
        // Decisions and validations are rare and worth having on disk at once; steps are not.
        let rare = !matches!(event, Event::Step(_));
        writeln!(self.file, "{line}")
            .and_then(|()| if rare { self.file.flush() } else { Ok(()) })
            .map_err(|e| Error::io(&self.path, e))
    }
}
