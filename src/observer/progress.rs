//! The progress bar.

use super::{Event, Observer};
use crate::error::Error;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::{Duration, Instant};

/// A line at the bottom of the terminal: step, loss, validation loss, batch, similarity, noise scale, samples/s, ETA.
///
/// Where standard error is no terminal the bar is silent.
#[derive(Debug)]
pub struct ProgressDisplay {
    bar: ProgressBar,
    validation: Option<f64>,
    smoothed_loss: Option<f64>,
    drawn: Instant,
}

impl Default for ProgressDisplay {
    fn default() -> Self {
        Self::new()
    }
}

impl ProgressDisplay {
    /// A bar on standard error.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(5));
        let style = ProgressStyle::with_template(
            "{prefix:>12} [{bar:24}] {percent:>3}% {msg} | {per_sec} | ETA {eta}",
        )
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .with_key(
            "per_sec",
            |s: &indicatif::ProgressState, w: &mut dyn std::fmt::Write| {
                // The only failure is that of the writer, which the bar cannot report anyway.
                let _ = write!(w, "{:.0} samples/s", s.per_sec());
            },
        )
        .progress_chars("=> ");
        bar.set_style(style);
        Self {
            bar,
            validation: None,
            smoothed_loss: None,
            drawn: Instant::now(),
        }
    }
}

fn show(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"))
}

impl Observer for ProgressDisplay {
    fn observe(&mut self, event: &Event<'_>) -> Result<(), Error> {
        match event {
            Event::Started { name, samples, .. } => {
                self.bar.set_length(*samples);
                self.bar.set_prefix((*name).to_owned());
                self.bar.reset();
            }
            Event::Step(s) => {
                // A single batch's loss jumps about; the eye wants the trend.
                let smoothed = self
                    .smoothed_loss
                    .map_or(s.loss, |old| old + 0.05 * (s.loss - old));
                self.smoothed_loss = Some(smoothed);
                self.bar.set_position(s.samples);
                if self.drawn.elapsed() >= Duration::from_millis(100) {
                    self.drawn = Instant::now();
                    self.bar.set_message(format!(
                        "step {} | loss {smoothed:.3} | val {} | batch {} | sim {} | noise {}",
                        s.step,
                        show(self.validation, 3),
                        s.batch,
                        show(s.similarity, 3),
                        show(s.noise_scale, 0),
                    ));
                }
            }
            Event::Validation(v) => self.validation = Some(v.loss),
            Event::Decision(_) => {}
            Event::Finished(_) => self.bar.finish_and_clear(),
        }
        Ok(())
    }
}
