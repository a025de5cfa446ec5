//! A text as a data set: characters become tokens, windows of it become samples in an ordered index.

use crate::error::Error;
use dytis::DytisMap;
use std::collections::BTreeSet;
use std::path::Path;

/// Where a sample lies in the token sequence: `context` inputs and, shifted by one, as many targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First token of the window.
    pub start: u32,
    /// Number of input tokens; the window itself is one longer, for the last target.
    pub context: u32,
}

/// A text cut into samples that are keyed by their position.
///
/// The samples lie in a [`DytisMap`] from position (in characters) to [`Window`], so that a range of positions is a range of
/// the map: training and validation data are two such ranges, and no window crosses the border between them.
///
/// Memory: one byte per character, about thirty per sample.
#[derive(Debug, Clone)]
pub struct CharCorpus {
    tokens: Vec<u8>,
    vocabulary: Vec<char>,
    windows: DytisMap<u64, Window>,
    context: usize,
    training: Vec<u64>,
    validation: Vec<u64>,
}

impl CharCorpus {
    /// Reads a UTF-8 text file; see [`from_text`](Self::from_text).
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Data`] naming it if it cannot be cut.
    pub fn from_path(
        path: impl AsRef<Path>,
        context: usize,
        stride: usize,
        validation: f64,
    ) -> Result<Self, Error> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
        Self::cut(
            &path.display().to_string(),
            &text,
            context,
            stride,
            validation,
        )
    }

    /// Cuts a text into windows of `context` inputs that begin every `stride` characters; the last `validation` part of the text
    /// (a fraction, by position) is kept for validation.
    ///
    /// # Errors
    /// [`Error::Setting`] for a context or stride of zero or a fraction outside (0, 1); [`Error::Data`] for a text without a
    /// character, with more than 256 distinct ones, or too short for one training and one validation window.
    ///
    /// # Examples
    /// ```
    /// let corpus = hpmd::CharCorpus::from_text(&"to be or not to be ".repeat(20), 8, 4, 0.25)?;
    /// assert_eq!(corpus.vocabulary().len(), 7);
    /// let border = corpus.validation_samples()[0];
    /// assert!(corpus.training_samples().iter().all(|&k| k + 8 < border));
    /// # Ok::<(), hpmd::Error>(())
    /// ```
    pub fn from_text(
        text: &str,
        context: usize,
        stride: usize,
        validation: f64,
    ) -> Result<Self, Error> {
        Self::cut("text", text, context, stride, validation)
    }

    fn cut(
        what: &str,
        text: &str,
        context: usize,
        stride: usize,
        validation: f64,
    ) -> Result<Self, Error> {
        if context == 0 {
            return Err(Error::setting("context", context, "at least one character"));
        }
        if stride == 0 {
            return Err(Error::setting("stride", stride, "at least one character"));
        }
        if !(validation > 0.0 && validation < 1.0) {
            return Err(Error::setting(
                "validation",
                validation,
                "a fraction between 0 and 1, both excluded",
            ));
        }
        let data = |reason: String| Error::Data {
            what: what.to_owned(),
            reason,
        };
        if text.is_empty() {
            return Err(data("the corpus is empty".to_owned()));
        }
        let vocabulary: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        if vocabulary.len() > usize::from(u8::MAX) + 1 {
            return Err(data(format!(
                "{} distinct characters, at most 256 can be tokens of one byte",
                vocabulary.len()
            )));
        }
        let token = |c: char| vocabulary.binary_search(&c).map_or(0, |i| i as u8);
        let tokens: Vec<u8> = text.chars().map(token).collect();
        if u32::try_from(tokens.len()).is_err() {
            return Err(data(format!(
                "{} characters, at most 2^32 - 1 can be addressed",
                tokens.len()
            )));
        }

        let border = tokens.len() - (tokens.len() as f64 * validation) as usize;
        let mut windows = DytisMap::new();
        let mut keys_of = |from: usize, to: usize| -> Vec<u64> {
            let starts = (from..to).step_by(stride).take_while(|s| s + context < to);
            starts
                .map(|s| {
                    windows.insert(
                        s as u64,
                        Window {
                            start: s as u32,
                            context: context as u32,
                        },
                    );
                    s as u64
                })
                .collect()
        };
        let training = keys_of(0, border);
        let held_out = keys_of(border, tokens.len());
        if training.is_empty() || held_out.is_empty() {
            return Err(data(format!(
                "{} characters give {} training and {} validation samples of {context} + 1 characters; both need one",
                tokens.len(),
                training.len(),
                held_out.len(),
            )));
        }
        Ok(Self {
            tokens,
            vocabulary,
            windows,
            context,
            training,
            validation: held_out,
        })
    }

    /// The distinct characters in code point order; a token is an index into it.
    pub fn vocabulary(&self) -> &[char] {
        &self.vocabulary
    }

    /// Input tokens per sample.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The index: position to window.
    pub fn windows(&self) -> &DytisMap<u64, Window> {
        &self.windows
    }

    /// Keys of the training samples in ascending order.
    pub fn training_samples(&self) -> &[u64] {
        &self.training
    }

    /// Keys of the validation samples in ascending order; all lie behind the training samples.
    pub fn validation_samples(&self) -> &[u64] {
        &self.validation
    }

    /// The tokens of one sample: `context + 1` of them, inputs are all but the last and targets all but the first.
    ///
    /// # Errors
    /// [`Error::Data`] if no sample has this key.
    pub fn sample(&self, key: u64) -> Result<&[u8], Error> {
        let window = self.windows.get(&key).ok_or_else(|| Error::Data {
            what: format!("sample {key}"),
            reason: "no sample of the corpus begins at this position".to_owned(),
        })?;
        let start = window.start as usize;
        Ok(&self.tokens[start..=start + window.context as usize])
    }

    /// The text of a token sequence; tokens outside the vocabulary are left out.
    pub fn decode(&self, tokens: &[u8]) -> String {
        tokens
            .iter()
            .filter_map(|&t| self.vocabulary.get(usize::from(t)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_hold_the_text_and_never_cross_the_border() {
        let text: String = ('a'..='z').cycle().take(1000).collect();
        let corpus = CharCorpus::from_text(&text, 16, 8, 0.2).unwrap();
        let border = 800;
        for &key in corpus.training_samples() {
            assert!(key + 16 < border, "window at {key}");
            assert_eq!(
                corpus.decode(corpus.sample(key).unwrap()),
                text[key as usize..=key as usize + 16]
            );
        }
        assert_eq!(corpus.validation_samples()[0], border);
        assert_eq!(
            corpus.windows().len(),
            corpus.training_samples().len() + corpus.validation_samples().len()
        );
        assert!(
            corpus
                .windows()
                .range(border..)
                .map(|(k, _)| k)
                .eq(corpus.validation_samples().iter().copied())
        );
    }

    #[test]
    fn what_cannot_be_cut_is_refused_by_name() {
        let message = |r: Result<CharCorpus, Error>| r.unwrap_err().to_string();
        assert_eq!(
            message(CharCorpus::from_text("", 8, 8, 0.1)),
            "text: the corpus is empty"
        );
        assert!(
            message(CharCorpus::from_text("short", 8, 8, 0.1))
                .starts_with("text: 5 characters give 0 training")
        );
        assert!(message(CharCorpus::from_text("abc", 0, 8, 0.1)).starts_with("context = 0"));
        assert!(message(CharCorpus::from_text("abc", 1, 0, 0.1)).starts_with("stride = 0"));
        for fraction in [0.0, 1.0, f64::NAN, -0.5] {
            assert!(
                message(CharCorpus::from_text("abc", 1, 1, fraction)).starts_with("validation = ")
            );
        }
        assert!(
            message(CharCorpus::from_path("/no/such/file", 8, 8, 0.1))
                .starts_with("/no/such/file: ")
        );
    }

    #[test]
    fn an_unknown_sample_is_an_error() {
        let corpus = CharCorpus::from_text(&"xyz".repeat(50), 4, 4, 0.2).unwrap();
        assert_eq!(
            corpus.sample(1).unwrap_err().to_string(),
            "sample 1: no sample of the corpus begins at this position"
        );
    }
}
