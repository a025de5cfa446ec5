//! The table and the plot of `dytis_table`.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::fmt::Write as _;
use std::{fs, process};

/// The timed phases, in the order in which they run.
pub const PHASES: [&str; 6] = ["Load", "CU", "C", "A", "E", "Del"];

/// One map on one stream.
#[derive(Debug)]
pub struct Cell {
    pub index: &'static str,
    /// Mops/s per phase.
    pub speeds: [f64; PHASES.len()],
    pub bytes_per_key: f64,
    pub p999_us: f64,
    pub max_us: f64,
}

#[derive(Debug)]
struct Row {
    stream: &'static str,
    keys: usize,
    cells: Vec<Cell>,
}

impl Row {
    /// The first map's speed over that of the best other one, and that one's name.
    fn ratio(&self, phase: usize) -> Option<(f64, &'static str)> {
        let best = self.cells[1..]
            .iter()
            .max_by(|a, b| a.speeds[phase].total_cmp(&b.speeds[phase]))?;
        Some((self.cells[0].speeds[phase] / best.speeds[phase], best.index))
    }

    fn ratio_to(&self, index: &str, phase: usize) -> Option<f64> {
        let other = self.cells[1..].iter().find(|cell| cell.index == index)?;
        Some(self.cells[0].speeds[phase] / other.speeds[phase])
    }
}

/// Everything measured.
#[derive(Debug)]
pub struct Report {
    keys: usize,
    rounds: usize,
    rows: Vec<Row>,
}

impl Report {
    pub fn new(keys: usize, rounds: usize) -> Self {
        Self {
            keys,
            rounds,
            rows: Vec::new(),
        }
    }

    /// Adds a stream; the first cell is the map that the others are compared with.
    pub fn add(&mut self, stream: &'static str, keys: usize, cells: Vec<Cell>) {
        self.rows.push(Row {
            stream,
            keys,
            cells,
        });
    }

    pub fn markdown(&self) -> String {
        let mut out = format!(
            "{} keys a stream (u64 to u64), one thread, median of {} round(s), maps interleaved; {}; commit {}.\n\n",
            self.keys,
            self.rounds,
            machine(),
            commit()
        );
        self.ratio_table(&mut out);
        self.speed_table(&mut out);
        out
    }

    fn ratio_table(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "Speed over the best rival's in the same cell (below 1: a loss):\n"
        );
        let _ = writeln!(
            out,
            "| stream | {} |\n|---|{}",
            PHASES.join(" | "),
            "---|".repeat(PHASES.len())
        );
        for row in &self.rows {
            let _ = write!(out, "| {} |", row.stream);
            for phase in 0..PHASES.len() {
                let _ = match row.ratio(phase) {
                    Some((ratio, best)) => write!(out, " {ratio:.2} ({best}) |"),
                    None => write!(out, " |"),
                };
            }
            out.push('\n');
        }
        for rival in ["brie", "std"] {
            let mean = |phase: usize| {
                let logs: Vec<f64> = self
                    .rows
                    .iter()
                    .filter_map(|row| row.ratio_to(rival, phase))
                    .map(f64::ln)
                    .collect();
                (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
            };
            if mean(0).is_some() {
                let _ = write!(out, "| *geometric mean over {rival}* |");
                for phase in 0..PHASES.len() {
                    let _ = write!(out, " {:.2} |", mean(phase).unwrap_or(f64::NAN));
                }
                out.push('\n');
            }
        }
        out.push('\n');
    }

    fn speed_table(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "Mops/s, heap bytes per key after Load, and microseconds of single inserts:\n"
        );
        let _ = writeln!(
            out,
            "| stream | map | {} | bytes/key | p99.9 us | max us |\n|---|---|{}---|---|---|",
            PHASES.join(" | "),
            "---|".repeat(PHASES.len())
        );
        for row in &self.rows {
            for cell in &row.cells {
                let _ = write!(out, "| {} ({}) | {} |", row.stream, row.keys, cell.index);
                for speed in cell.speeds {
                    let _ = write!(out, " {speed:.2} |");
                }
                let Cell {
                    bytes_per_key,
                    p999_us,
                    max_us,
                    ..
                } = cell;
                let _ = writeln!(out, " {bytes_per_key:.1} | {p999_us:.1} | {max_us:.0} |");
            }
        }
    }

    /// A grid of streams and phases: the ratio to the best rival, green above 1, red below.
    pub fn svg(&self) -> String {
        let [left, top, width, height] = [120, 56, 92, 30_usize];
        let size = (
            left + width * PHASES.len() + 12,
            top + height * self.rows.len() + 12,
        );
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"12\" y=\"20\" font-size=\"14\">DytisMap's speed over the best rival's, {2} keys</text>\n",
            size.0, size.1, self.keys
        );
        for (phase, name) in PHASES.iter().enumerate() {
            let x = left + width * phase + width / 2;
            let _ = writeln!(
                out,
                "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
                top - 8
            );
        }
        for (line, row) in self.rows.iter().enumerate() {
            let y = top + height * line;
            let text = y + height / 2 + 4;
            let _ = writeln!(out, "<text x=\"12\" y=\"{text}\">{}</text>", row.stream);
            for phase in 0..PHASES.len() {
                let Some((ratio, best)) = row.ratio(phase) else {
                    continue;
                };
                let x = left + width * phase;
                let _ = writeln!(
                    out,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{}\"/>\
                     <text x=\"{}\" y=\"{text}\" text-anchor=\"middle\">{ratio:.2} {best}</text>",
                    width - 2,
                    height - 2,
                    shade(ratio),
                    x + width / 2
                );
            }
        }
        out.push_str("</svg>\n");
        out
    }
}

/// White at 1, full green at 3 times as fast, full red at 3 times as slow.
fn shade(ratio: f64) -> String {
    let strength = (ratio.ln() / 3_f64.ln()).clamp(-1.0, 1.0);
    let fade = |full: f64| (255.0 - (255.0 - full) * strength.abs()) as u8;
    let full = if strength > 0.0 {
        [90.0, 190.0, 120.0]
    } else {
        [230.0, 100.0, 90.0]
    };
    let [red, green, blue] = full.map(fade);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn machine() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("unknown processor", |(_, name)| name);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let simd = if cfg!(target_feature = "avx512bw") {
        ", built with AVX-512"
    } else {
        ""
    };
    format!("{cores} cores of {model}{simd}")
}

fn commit() -> String {
    let git = process::Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=10"])
        .output();
    match git {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        _ => "unknown".to_owned(),
    }
}
