//! Reading the inputs from TOML or JSON, with errors that name file, line, field, value and what is allowed.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{Error, Place, Result};

/// An input that is checked as a whole once it has been read.
pub(crate) trait Validate {
    /// Checks every field.
    fn validate(&self) -> Result<()>;
}

/// Reads a file: `.json` is JSON, everything else is TOML.
pub(crate) fn read<T: DeserializeOwned + Validate>(path: &Path) -> Result<T> {
    let text = text(path)?;
    if path
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        parse_json(&text, Some(path))
    } else {
        parse_toml(&text, Some(path))
    }
}

/// The text of a file.
pub(crate) fn text(path: &Path) -> Result<String> {
    let bytes = fs::read(path).map_err(|error| Error::File {
        path: path.to_owned(),
        message: error.to_string(),
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = valid.split(|&byte| byte == b'\n').count();
        Error::Syntax {
            place: place(Some(path), Some(line)),
            message: "not UTF-8 text".to_owned(),
        }
    })
}

/// Parses and validates a TOML text.
pub(crate) fn parse_toml<T: DeserializeOwned + Validate>(
    text: &str,
    path: Option<&Path>,
) -> Result<T> {
    let value: T = toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| line_of(text, span.start));
        let key = error
            .span()
            .and_then(|span| key_at(text, span.start))
            .map(|key| format!("field `{key}`: "))
            .unwrap_or_default();
        Error::Syntax {
            place: place(path, line),
            message: format!("{key}{}", one_line(error.message())),
        }
    })?;
    value
        .validate()
        .map_err(|error| with_place(error, path, |field| locate(text, field)))?;
    Ok(value)
}

/// Parses and validates a JSON text.
pub(crate) fn parse_json<T: DeserializeOwned + Validate>(
    text: &str,
    path: Option<&Path>,
) -> Result<T> {
    let value: T = serde_json::from_str(text).map_err(|error| Error::Syntax {
        place: place(path, Some(error.line())),
        message: one_line(&error.to_string()),
    })?;
    value
        .validate()
        .map_err(|error| with_place(error, path, |_| None))?;
    Ok(value)
}

fn place(path: Option<&Path>, line: Option<usize>) -> Place {
    Place {
        path: path.map(Path::to_owned),
        line,
    }
}

fn with_place(
    error: Error,
    path: Option<&Path>,
    locate: impl FnOnce(&str) -> Option<usize>,
) -> Error {
    match error {
        Error::Field {
            field,
            value,
            allowed,
            ..
        } => Error::Field {
            place: place(path, locate(&field)),
            field,
            value,
            allowed,
        },
        other => other,
    }
}

/// A parser's message on one line, with the names of integer types as what they hold.
pub(crate) fn one_line(message: &str) -> String {
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    for (name, most) in [
        ("expected u8", u64::from(u8::MAX)),
        ("expected u32", u64::from(u32::MAX)),
        ("expected u64", u64::MAX),
    ] {
        if let Some((before, after)) = message.split_once(name) {
            return format!("{before}expected a whole number from 0 to {most}{after}");
        }
    }
    message
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..text.floor_char_boundary(offset)]
        .matches('\n')
        .count()
        + 1
}

/// Line of a field path such as `groups[1].nodes`, or of the nearest table around it that exists.
fn locate(text: &str, field: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let mut table = Some(document.get_ref());
    let mut offset = None;
    for part in field.split('.') {
        let (name, index) = match part.split_once('[') {
            Some((name, index)) => (name, index.trim_end_matches(']').parse::<usize>().ok()),
            None => (part, None),
        };
        let Some((key, value)) =
            table.and_then(|table| table.iter().find(|(key, _)| key.get_ref().as_ref() == name))
        else {
            break;
        };
        offset = Some(key.span().start);
        let mut value: &Spanned<DeValue<'_>> = value;
        if let (Some(index), DeValue::Array(items)) = (index, value.get_ref()) {
            match items.get(index) {
                Some(item) => {
                    value = item;
                    offset = Some(item.span().start);
                }
                None => break,
            }
        }
        table = match value.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => None,
        };
    }
    offset.map(|offset| line_of(text, offset))
}

/// The key of the `key = value` line at `offset`, if there is one.
fn key_at(text: &str, offset: usize) -> Option<&str> {
    let start = text.get(..offset)?.rfind('\n').map_or(0, |at| at + 1);
    let line = text[start..].lines().next()?;
    let (key, _) = line.split_once('=')?;
    let key = key.trim();
    (!key.is_empty() && !key.starts_with('#')).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_located_in_nested_tables() {
        let text =
            "a = 1\n\n[[groups]]\nnodes = 2\n[[groups]]\nnodes = 3\nlink = { latency_us = 2 }\n";
        assert_eq!(locate(text, "a"), Some(1));
        assert_eq!(locate(text, "groups[1].nodes"), Some(6));
        assert_eq!(locate(text, "groups[1].link.latency_us"), Some(7));
        assert_eq!(locate(text, "groups[1].absent"), Some(5));
        assert_eq!(locate(text, "absent"), None);
    }
}
