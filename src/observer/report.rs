//! The HTML report: one file, no network, no script needed to read it.

mod chart;

use super::{Event, Observer};
use crate::error::Error;
use crate::record::{FrontView, TrainingReport};
use chart::{Chart, Series};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Writes [`render`]'s page when the run ends.
#[derive(Debug)]
pub struct HtmlReport {
    path: PathBuf,
}

impl HtmlReport {
    /// A report at `path`; an existing file is replaced when the run ends.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }
}

impl Observer for HtmlReport {
    fn observe(&mut self, event: &Event<'_>) -> Result<(), Error> {
        match event {
            // Better to learn of an unusable path before the run than after it.
            Event::Started { name, .. } => write(&self.path, name, &[]),
            Event::Finished(report) => {
                write(&self.path, &report.name, std::slice::from_ref(*report))
            }
            _ => Ok(()),
        }
    }
}

/// Writes [`render`]'s page to `path`, creating the folder where it is missing.
///
/// # Errors
/// [`Error::Io`] naming the path.
pub fn write(path: &Path, title: &str, runs: &[TrainingReport]) -> Result<(), Error> {
    let page = render(title, runs);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    }
    std::fs::write(path, page).map_err(|e| Error::io(path, e))
}

/// The page: a summary table, charts of loss, batch, learning rate, similarity and noise scale over steps with one line per run, the
/// decisions of each run that adapted with their reasons, and the first run's Pareto front with the choice marked.
pub fn render(title: &str, runs: &[TrainingReport]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>{STYLE}</style></head><body>\n<h1>{0}</h1>\n",
        escape(title)
    );
    page += &summary(runs);
    page += "<div class=\"charts\">\n";
    for chart in charts(runs) {
        page += &chart.figure();
    }
    if let Some(front) = runs.iter().find_map(|r| r.front.as_ref()) {
        page += &front_chart(front).figure();
    }
    page += "</div>\n";
    for run in runs {
        page += &decisions(run);
    }
    page += "</body></html>\n";
    page
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}\
    table{border-collapse:collapse;margin:1em 0}th,td{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}\
    th:first-child,td:first-child{text-align:left}.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(30em,1fr));gap:1em}\
    figure{margin:0}svg{width:100%;height:auto}figcaption,.note{color:#666;font-size:.9em}summary{cursor:pointer}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

fn optional(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |v| format!("{v:.digits$}"))
}

fn summary(runs: &[TrainingReport]) -> String {
    let mut table = String::from(
        "<table><tr><th>run</th><th>steps</th><th>samples</th><th>wall time here (s)</th><th>simulated time (s)</th>\
         <th>simulated cost</th><th>validation loss</th><th>ended</th></tr>\n",
    );
    for run in runs {
        // Writing to a string cannot fail.
        let _ = writeln!(
            table,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{:.1}</td><td>{}</td><td>{}</td><td>{}</td><td>{:?}</td></tr>",
            escape(&run.name),
            run.steps.len(),
            run.samples(),
            run.wall_seconds(),
            optional(run.simulated_seconds(), 2),
            optional(run.simulated_cost(), 5),
            optional(run.validation_loss(), 4),
            run.termination,
        );
    }
    table += "</table>\n<p class=\"note\">Simulated figures are the planner's model of the cluster named in the configuration, \
              not measurements; everything else was computed and measured on the machine that wrote this page.</p>\n";
    table
}

/// At most this many points per line: more cannot be seen and only make the file large.
const POINTS: usize = 400;

/// Points of a line: (x, y).
type Points = Vec<(f64, f64)>;

/// Averages runs of neighbouring points so that at most [`POINTS`] remain.
fn thin(points: &[(f64, f64)]) -> Points {
    let per = points.len().div_ceil(POINTS).max(1);
    let mean = |c: &[(f64, f64)]| {
        let n = c.len() as f64;
        (
            c.iter().map(|p| p.0).sum::<f64>() / n,
            c.iter().map(|p| p.1).sum::<f64>() / n,
        )
    };
    points.chunks(per).map(mean).collect()
}

/// Keeps at most [`POINTS`] of the values themselves: averages would invent batch sizes that never ran.
fn sample(points: &[(f64, f64)]) -> Points {
    let per = points.len().div_ceil(POINTS).max(1);
    points.iter().copied().step_by(per).collect()
}

fn charts(runs: &[TrainingReport]) -> Vec<Chart> {
    let over_steps = |title: &str,
                      y: &str,
                      value: fn(&crate::record::StepRecord) -> Option<f64>,
                      reduce: fn(&[(f64, f64)]) -> Points| {
        let lines = runs.iter().map(|r| {
            let points: Points = r
                .steps
                .iter()
                .filter_map(|s| value(s).map(|v| (s.step as f64, v)))
                .collect();
            Series::line(&r.name, reduce(&points))
        });
        Chart::new(title, "step", y).with_series(lines)
    };
    let mut loss = over_steps(
        "Training loss (lines) and validation loss (dots)",
        "nats",
        |s| Some(s.loss),
        thin,
    );
    loss = loss.with_series(runs.iter().enumerate().map(|(i, r)| {
        let points = r
            .validations
            .iter()
            .map(|v| (v.step as f64, v.loss))
            .collect();
        Series::dots(points).with_colour(i)
    }));
    let by_samples = Chart::new("Validation loss over samples", "samples", "nats").with_series(
        runs.iter().map(|r| {
            Series::line(
                &r.name,
                r.validations
                    .iter()
                    .map(|v| (v.samples as f64, v.loss))
                    .collect(),
            )
        }),
    );
    let mut all = vec![
        loss,
        by_samples,
        over_steps(
            "Global batch size",
            "samples",
            |s| Some(s.batch as f64),
            sample,
        ),
        over_steps("Learning rate", "", |s| Some(s.learning_rate), sample),
        over_steps(
            "Micro-batch gradient similarity (smoothed)",
            "cosine",
            |s| s.similarity,
            sample,
        ),
        over_steps(
            "Gradient noise scale (smoothed)",
            "samples",
            |s| s.noise_scale,
            sample,
        ),
    ];
    all.retain(|c| !c.is_empty());
    all
}

fn front_chart(front: &FrontView) -> Chart {
    let line = front
        .points
        .iter()
        .map(|p| (p.0 * 1e3, p.1 * 1e3))
        .collect::<Vec<_>>();
    let chosen = line.get(front.chosen).copied().into_iter().collect();
    let label = front.points.get(front.chosen).map_or("", |p| p.2.as_str());
    Chart::new(
        "Pareto front (simulated), in the currency of the prices",
        "ms per step",
        "cost per 1000 steps",
    )
    .with_series([
        Series::line("front", line.clone()),
        Series::dots(line),
        Series::line(&format!("chosen: {label}"), Vec::new()).with_colour(3),
        Series::marks(chosen).with_colour(3),
    ])
}

fn decisions(run: &TrainingReport) -> String {
    if run.decisions.iter().all(|d| d.to_batch == d.from_batch) {
        return String::new();
    }
    let mut rows = format!(
        "<details><summary>{}: {} decisions</summary><table><tr><th>step</th><th>similarity</th><th>noise scale</th>\
         <th>batch</th><th>learning rate</th><th>micro-batches per device</th><th>reason</th></tr>\n",
        escape(&run.name),
        run.decisions.len()
    );
    for d in &run.decisions {
        let _ = writeln!(
            rows,
            "<tr><td>{}</td><td>{:.4}</td><td>{:.1}</td><td>{} &rarr; {}</td><td>{:.5}</td><td>{:?}</td><td>{}</td></tr>",
            d.step,
            d.similarity,
            d.noise_scale,
            d.from_batch,
            d.to_batch,
            d.learning_rate,
            d.micro_batches,
            escape(&d.reason)
        );
    }
    rows + "</table></details>\n"
}
