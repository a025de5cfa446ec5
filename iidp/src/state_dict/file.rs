//! Files in the `safetensors` format.
//!
//! A file is the length of its header (64 bits, little endian), the header (a JSON object that gives each tensor's type, shape and place in the data, and
//! text under `__metadata__`; padded with spaces to a multiple of eight bytes), then the data, tensor after tensor without gaps.
//!
//! Written here rather than by the format's own crate, so that tensors are streamed instead of being collected in memory, the same state gives the same bytes, and
//! an error names the tensor.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::{OPTIMIZER, StateDict, StateTensor, mismatch};
use crate::error::Error;

/// Longest header that readers of the format accept.
const LONGEST_HEADER: u64 = 100_000_000;

/// Elements that are converted at a time.
const CHUNK: usize = 16 * 1024;

const METADATA: &str = "__metadata__";
const STEPS: &str = "steps";

/// A tensor as the header describes it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

enum Values<'a> {
    Count(u64),
    Floats(&'a [f32]),
}

impl StateDict {
    /// Writes the state to a file, whole or not at all: to a new file beside it, which takes its name once it is on the disk. The same state gives the
    /// same bytes.
    ///
    /// # Errors
    ///
    /// [`Error::StateFile`] when the file cannot be written (what was there before is still there then); [`Error::StateTensor`] for a tensor with as many
    /// elements as its shape does not say, or a name that the format reserves.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let tensors = self.in_order()?;
        let header = self.header(&tensors);
        let temporary = temporary_name(path);
        let write = || {
            let mut file = BufWriter::with_capacity(1 << 20, File::create(&temporary)?);
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            for (_, _, values) in &tensors {
                match values {
                    Values::Count(count) => file.write_all(&count.to_le_bytes())?,
                    Values::Floats(values) => write_floats(&mut file, values)?,
                }
            }
            file.into_inner()
                .map_err(io::IntoInnerError::into_error)?
                .sync_all()?;
            fs::rename(&temporary, path)?;
            // The new name is on the disk when its directory is. Not every system lets a directory be opened.
            if let Some(Ok(directory)) = path.parent().map(File::open) {
                directory.sync_all()?;
            }
            Ok(())
        };
        write().map_err(|error: io::Error| {
            // What cannot be removed is a stray file, which the caller's error does not become better by.
            let _ = fs::remove_file(&temporary);
            file_error(path, error.to_string())
        })
    }

    /// Reads a file that [`save`](Self::save) or any other writer of the format has written, of 32-bit floats (and counts of updates).
    ///
    /// # Errors
    ///
    /// [`Error::StateFile`] when the file cannot be read or is not in the format; [`Error::StateTensor`], naming the tensor, when it is cut off
    /// in the middle of one, or one has another type or a length that is not its shape's.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let failed = |error: io::Error| file_error(path, error.to_string());
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut file = BufReader::with_capacity(1 << 20, file);
        let (metadata, entries) = read_header(&mut file, length).map_err(|e| e.at(path))?;
        let mut dict = Self {
            metadata,
            ..Self::default()
        };
        for (name, entry) in entries {
            let elements = entry.shape.iter().product();
            if let Some(count) = count_of(&name) {
                let mut bytes = [0; 8];
                file.read_exact(&mut bytes).map_err(failed)?;
                let Ok(steps) = u64::try_from(i64::from_le_bytes(bytes)) else {
                    return Err(mismatch(&name, "a count below zero".into()));
                };
                dict.steps.insert(count.to_owned(), steps);
                continue;
            }
            let values = read_floats(&mut file, elements).map_err(failed)?;
            let moment = name
                .strip_prefix(OPTIMIZER)
                .and_then(|rest| rest.split_once('.'));
            if let Some((moment, parameter)) = moment {
                let by_name = dict.moments.entry(moment.to_owned()).or_default();
                by_name.insert(parameter.to_owned(), values);
            } else {
                let shape = entry.shape;
                dict.tensors.insert(name, StateTensor { shape, values });
            }
        }
        Ok(dict)
    }

    /// All tensors in the order of the data: counts first, which need the greater alignment, then by name.
    fn in_order(&self) -> Result<Vec<(String, Vec<usize>, Values<'_>)>, Error> {
        let mut tensors = Vec::new();
        for (name, count) in &self.steps {
            let name = format!("{OPTIMIZER}{STEPS}.{name}");
            if i64::try_from(*count).is_err() {
                return Err(mismatch(&name, format!("{count}, expected less than 2^63")));
            }
            tensors.push((name, Vec::new(), Values::Count(*count)));
        }
        for (moment, by_name) in &self.moments {
            if moment == STEPS || moment.contains('.') {
                return Err(mismatch(
                    moment,
                    "a moment of that name, expected one without a dot and not `steps`".into(),
                ));
            }
            for (parameter, values) in by_name {
                let name = format!("{OPTIMIZER}{moment}.{parameter}");
                let Some(tensor) = self.tensors.get(parameter) else {
                    return Err(mismatch(&name, "a moment of no parameter".into()));
                };
                super::check_elements(&name, values, &tensor.shape)?;
                tensors.push((name, tensor.shape.clone(), Values::Floats(values)));
            }
        }
        for (name, tensor) in &self.tensors {
            if name == METADATA || name.starts_with(OPTIMIZER) {
                return Err(mismatch(name, "a reserved name".into()));
            }
            super::check_elements(name, &tensor.values, &tensor.shape)?;
            let values = Values::Floats(&tensor.values);
            tensors.push((name.clone(), tensor.shape.clone(), values));
        }
        Ok(tensors)
    }

    fn header(&self, tensors: &[(String, Vec<usize>, Values<'_>)]) -> Vec<u8> {
        let mut header = serde_json::Map::new();
        if !self.metadata.is_empty() {
            let texts = self.metadata.iter();
            let texts = texts.map(|(key, text)| (key.clone(), text.as_str().into()));
            header.insert(METADATA.into(), serde_json::Value::Object(texts.collect()));
        }
        let mut start = 0;
        for (name, shape, values) in tensors {
            let (dtype, bytes) = match values {
                Values::Count(_) => ("I64", 8),
                Values::Floats(values) => ("F32", size_of_val(*values) as u64),
            };
            let entry = serde_json::json!({
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [start, start + bytes],
            });
            header.insert(name.clone(), entry);
            start += bytes;
        }
        let mut header = serde_json::Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        header
    }
}

/// The parameter whose updates a tensor of this name counts.
fn count_of(name: &str) -> Option<&str> {
    name.strip_prefix(OPTIMIZER)?
        .strip_prefix(STEPS)?
        .strip_prefix('.')
}

fn write_floats(file: &mut impl Write, values: &[f32]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(CHUNK * size_of::<f32>());
    for chunk in values.chunks(CHUNK) {
        bytes.clear();
        bytes.extend(chunk.iter().flat_map(|value| value.to_le_bytes()));
        file.write_all(&bytes)?;
    }
    Ok(())
}

fn read_floats(file: &mut impl Read, elements: usize) -> io::Result<Vec<f32>> {
    let mut values = Vec::with_capacity(elements);
    let mut bytes = vec![0; CHUNK.min(elements) * size_of::<f32>()];
    while values.len() < elements {
        let now = CHUNK.min(elements - values.len()) * size_of::<f32>();
        file.read_exact(&mut bytes[..now])?;
        values.extend(
            bytes[..now]
                .as_chunks()
                .0
                .iter()
                .map(|four| f32::from_le_bytes(*four)),
        );
    }
    Ok(values)
}

/// A name beside `path` that no other writer uses.
fn temporary_name(path: &Path) -> PathBuf {
    static WRITERS: AtomicU64 = AtomicU64::new(0);
    let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}-{writer}.partial", std::process::id()));
    path.with_file_name(name)
}

fn file_error(path: &Path, problem: String) -> Error {
    Error::StateFile {
        path: path.to_owned(),
        problem,
    }
}

/// What is wrong with a header.
enum Flaw {
    File(String),
    Tensor(String, String),
}

impl Flaw {
    fn at(self, path: &Path) -> Error {
        match self {
            Self::File(problem) => file_error(path, problem),
            Self::Tensor(name, problem) => mismatch(&name, problem),
        }
    }
}

type Header = (BTreeMap<String, String>, Vec<(String, Entry)>);

/// Reads and checks the header of a file of `length` bytes; entries in the order of the data.
fn read_header(file: &mut impl Read, length: u64) -> Result<Header, Flaw> {
    let failed = |error: io::Error| Flaw::File(error.to_string());
    if length < 8 {
        return Err(Flaw::File(format!("{length} bytes, expected at least 8")));
    }
    let mut bytes = [0; 8];
    file.read_exact(&mut bytes).map_err(failed)?;
    let header = u64::from_le_bytes(bytes);
    if header > LONGEST_HEADER || header > length - 8 {
        return Err(Flaw::File(format!(
            "{length} bytes with a header of {header}: cut off, or not a safetensors file"
        )));
    }
    let mut text = vec![0; header as usize];
    file.read_exact(&mut text).map_err(failed)?;
    let not_a_header = |error: serde_json::Error| Flaw::File(format!("header: {error}"));
    let mut parsed: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&text).map_err(not_a_header)?;
    let metadata = match parsed.remove(METADATA) {
        Some(texts) => serde_json::from_value(texts)
            .map_err(|error| Flaw::File(format!("{METADATA}: {error}")))?,
        None => BTreeMap::new(),
    };
    let mut entries = Vec::with_capacity(parsed.len());
    for (name, value) in parsed {
        match serde_json::from_value::<Entry>(value) {
            Ok(entry) => entries.push((name, entry)),
            Err(error) => return Err(Flaw::Tensor(name, error.to_string())),
        }
    }
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    check_entries(&entries, length - 8 - header)?;
    Ok((metadata, entries))
}

/// Checks types, and that the tensors fill the data without gaps.
fn check_entries(entries: &[(String, Entry)], data: u64) -> Result<(), Flaw> {
    let mut end = 0;
    for (name, entry) in entries {
        let flaw = |problem: String| Err(Flaw::Tensor(name.clone(), problem));
        let (dtype, width) = if count_of(name).is_some() {
            ("I64", 8)
        } else {
            ("F32", 4)
        };
        if entry.dtype != dtype {
            return flaw(format!("{}, expected {dtype}", entry.dtype));
        }
        if dtype == "I64" && !entry.shape.is_empty() {
            return flaw(format!("shape {:?}, expected a scalar", entry.shape));
        }
        let [from, to] = entry.data_offsets;
        let bytes = entry
            .shape
            .iter()
            .try_fold(width, |bytes: u64, size| bytes.checked_mul(*size as u64));
        if from > to || bytes != Some(to - from) {
            return flaw(format!(
                "bytes {from}..{to} for shape {:?} of {dtype}",
                entry.shape
            ));
        }
        if from != end {
            return flaw(format!("begins at byte {from} of the data, expected {end}"));
        }
        if to > data {
            return flaw(format!(
                "cut off: ends at byte {to} of the data, the file at {data}"
            ));
        }
        end = to;
    }
    if end == data {
        return Ok(());
    }
    Err(Flaw::File(format!(
        "{} bytes after the last tensor",
        data - end
    )))
}
