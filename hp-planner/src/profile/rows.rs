//! Tables of end-to-end measurements: one row per configuration that was run.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use crate::error::{Error, Place, Result};

/// Measurements of which predictions can learn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profile {
    /// End-to-end rows, in the order of the file.
    pub rows: Vec<MeasuredRow>,
}

/// One row: its cells by column name. Columns may be missing and cells may be empty; what is needed is checked by
/// [`MeasuredRow::case`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MeasuredRow {
    /// One-based line of the file.
    pub line: usize,
    cells: BTreeMap<String, String>,
}

impl Profile {
    /// Reads a CSV file with a header line.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read, [`Error::Syntax`] naming the line if it is not a table with an `id` column.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = std::fs::File::open(path).map_err(|error| Error::File {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
        Self::read(std::io::BufReader::new(file), Some(path))
    }

    /// Reads CSV from a reader; `path` is named in errors.
    ///
    /// # Errors
    /// [`Error::Syntax`].
    pub fn read(reader: impl Read, path: Option<&Path>) -> Result<Self> {
        let syntax = |line: Option<usize>, message: String| Error::Syntax {
            place: Place {
                path: path.map(Path::to_owned),
                line,
            },
            message,
        };
        let mut table = csv::ReaderBuilder::new()
            .flexible(false)
            .from_reader(reader);
        let wrong = |error: &csv::Error| {
            let line = error.position().map(|position| position.line() as usize);
            syntax(line, error.to_string())
        };
        let header = table.headers().map_err(|error| wrong(&error))?.clone();
        if !header.iter().any(|name| name == "id") {
            return Err(syntax(Some(1), "column `id` is missing".to_owned()));
        }
        let mut rows = Vec::new();
        for record in table.records() {
            let record = record.map_err(|error| wrong(&error))?;
            let line = record
                .position()
                .map_or(0, |position| position.line() as usize);
            let cells = header
                .iter()
                .zip(&record)
                .filter(|(_, cell)| !cell.trim().is_empty())
                .map(|(name, cell)| (name.to_owned(), cell.trim().to_owned()))
                .collect();
            rows.push(MeasuredRow { line, cells });
        }
        Ok(Self { rows })
    }
}

impl MeasuredRow {
    /// A cell, if the column exists and the cell is not empty.
    pub fn text(&self, column: &str) -> Option<&str> {
        self.cells.get(column).map(String::as_str)
    }

    /// A cell that is a finite number.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.text(column)?
            .parse()
            .ok()
            .filter(|value: &f64| value.is_finite())
    }

    /// Identifier of the row; empty if it has none.
    pub fn id(&self) -> &str {
        self.text("id").unwrap_or_default()
    }

    /// Where the row comes from; rows of one source are reported together.
    pub fn source(&self) -> &str {
        self.text("source").unwrap_or("unknown source")
    }

    /// Measured seconds per iteration.
    pub fn iteration_time(&self) -> Option<f64> {
        self.number("iter_s").filter(|&seconds| seconds > 0.0)
    }

    /// Measured memory of the fullest device in GiB.
    pub fn memory_gib(&self) -> Option<f64> {
        self.number("mem_gib").filter(|&gib| gib > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_cells_are_absent_and_broken_lines_are_named() {
        let profile = Profile::read("id,iter_s,gpu\na,1.5,\nb,,T4\n".as_bytes(), None).unwrap();
        assert_eq!(profile.rows[0].iteration_time(), Some(1.5));
        assert_eq!(profile.rows[0].text("gpu"), None);
        assert_eq!(profile.rows[1].iteration_time(), None);
        let error = Profile::read("id,x\na,1\nb\n".as_bytes(), None).unwrap_err();
        assert!(error.to_string().starts_with("line 3: "), "{error}");
        let error = Profile::read("name\nx\n".as_bytes(), None).unwrap_err();
        assert_eq!(error.to_string(), "line 1: column `id` is missing");
    }
}
