//! Tables and the plot of `dytis_table`, from its results.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::fmt::{self, Display, Write as _};
use std::str::FromStr;
use std::{fs, process};

use anyhow::{Context, Error, Result, ensure};

use super::plot::{self, Dots, geometric_mean};

/// The timed phases, in the order in which they run.
pub const PHASES: [&str; 8] = ["Load", "CU", "Miss", "C", "A", "E", "Del", "Saw"];

/// The map that all others are compared with, and the two that every stream has.
const SUBJECT: &str = "dytis";
const RIVALS: [(&str, &str); 2] = [("brie", "brie-tree"), ("std", "BTreeMap")];

/// One map on one stream; a line of the results file.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// The heading under which the stream is shown.
    pub group: String,
    pub stream: String,
    pub keys: usize,
    pub index: String,
    /// Mops/s per phase.
    pub speeds: [f64; PHASES.len()],
    pub bytes_per_key: f64,
    pub p999_us: f64,
    pub max_us: f64,
}

impl Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            group,
            stream,
            keys,
            index,
            ..
        } = self;
        write!(f, "{group}\t{stream}\t{keys}\t{index}")?;
        let latencies = [self.bytes_per_key, self.p999_us, self.max_us];
        let numbers = self.speeds.iter().chain(&latencies);
        numbers
            .into_iter()
            .try_for_each(|number| write!(f, "\t{number:.3}"))
    }
}

impl FromStr for Cell {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        let fields: Vec<&str> = line.split('\t').collect();
        let expected = 4 + PHASES.len() + 3;
        ensure!(
            fields.len() == expected,
            "expected {expected} fields, got {}",
            fields.len()
        );
        let number = |field: &str| {
            field
                .parse::<f64>()
                .with_context(|| format!("number {field}"))
        };
        let numbers = fields[4..].iter().map(|field| number(field));
        let numbers = numbers.collect::<Result<Vec<f64>>>()?;
        let rest = &numbers[PHASES.len()..];
        Ok(Self {
            group: fields[0].to_owned(),
            stream: fields[1].to_owned(),
            keys: fields[2]
                .parse()
                .with_context(|| format!("keys {}", fields[2]))?,
            index: fields[3].to_owned(),
            speeds: std::array::from_fn(|phase| numbers[phase]),
            bytes_per_key: rest[0],
            p999_us: rest[1],
            max_us: rest[2],
        })
    }
}

/// The maps on one stream.
#[derive(Debug)]
struct Row<'a> {
    subject: &'a Cell,
    others: Vec<&'a Cell>,
}

impl<'a> Row<'a> {
    fn rival(&self, index: &str) -> Option<&'a Cell> {
        self.others.iter().copied().find(|cell| cell.index == index)
    }

    /// The subject's speed over a rival's.
    fn ratio(&self, rival: &Cell, phase: usize) -> f64 {
        self.subject.speeds[phase] / rival.speeds[phase]
    }

    /// The fastest rival.
    fn best(&self, phase: usize) -> Option<&'a Cell> {
        let others = self.others.iter().copied();
        others.max_by(|a, b| a.speeds[phase].total_cmp(&b.speeds[phase]))
    }
}

/// Everything measured.
#[derive(Debug)]
pub struct Report {
    /// How and where: the distinct comment lines.
    headers: Vec<String>,
    cells: Vec<Cell>,
    /// Rows of `dytis_threads`, in Markdown already.
    threads: Vec<String>,
}

impl FromStr for Report {
    type Err = Error;

    /// Reads a results file. A later line of the same group, stream and map counts in place of an
    /// earlier one.
    fn from_str(results: &str) -> Result<Self> {
        let mut report = Self {
            headers: Vec::new(),
            cells: Vec::new(),
            threads: Vec::new(),
        };
        for (number, line) in results.lines().enumerate() {
            if let Some(header) = line.strip_prefix("# ") {
                let header = header.to_owned();
                if !report.headers.contains(&header) {
                    report.headers.push(header);
                }
                continue;
            }
            if line.starts_with('|') {
                // Stream, map and number of threads.
                let place = |row: &str| {
                    row.split('|')
                        .take(4)
                        .map(str::to_owned)
                        .collect::<Vec<_>>()
                };
                report.threads.retain(|row| place(row) != place(line));
                report.threads.push(line.to_owned());
                continue;
            }
            let cell: Cell = line
                .parse()
                .with_context(|| format!("line {}", number + 1))?;
            let name = |cell: &Cell| [cell.group.clone(), cell.stream.clone(), cell.index.clone()];
            match report.cells.iter_mut().find(|old| name(old) == name(&cell)) {
                Some(old) => *old = cell,
                None => report.cells.push(cell),
            }
        }
        ensure!(!report.cells.is_empty(), "no results");
        Ok(report)
    }
}

impl Report {
    /// Groups in order of appearance.
    fn groups(&self) -> Vec<&str> {
        let mut groups = Vec::new();
        for cell in &self.cells {
            if !groups.contains(&cell.group.as_str()) {
                groups.push(&cell.group);
            }
        }
        groups
    }

    fn rows(&self, group: &str) -> Vec<Row<'_>> {
        let of_group = || self.cells.iter().filter(|cell| cell.group == group);
        let subjects = of_group().filter(|cell| cell.index == SUBJECT);
        let row = |subject| Row {
            subject,
            others: of_group()
                .filter(|cell| cell.stream == subject.stream && cell.index != SUBJECT)
                .collect(),
        };
        subjects.map(row).collect()
    }

    /// Ratios, memory and latencies of the first group, and the threads, for the README.
    pub fn summary(&self) -> String {
        let mut out = format!("{}\n", self.headers.join("; "));
        self.comparison(&mut out, self.groups()[0]);
        if !self.threads.is_empty() {
            let title = "Threads: Mops/s of all together";
            heading(&mut out, title, &["map", "threads", "Load", "C", "A"]);
            out.push_str(&self.threads.join("\n"));
            out.push('\n');
        }
        out
    }

    /// The same of all other groups, and every speed.
    pub fn full(&self) -> String {
        let mut out = format!("{}\n", self.headers.join("; "));
        for group in &self.groups()[1..] {
            self.comparison(&mut out, group);
        }
        for group in self.groups() {
            let columns = [&["map"][..], &PHASES].concat();
            heading(&mut out, &format!("{group}: Mops/s"), &columns);
            for row in self.rows(group) {
                for cell in [row.subject].iter().chain(&row.others) {
                    let _ = write!(out, "| {} | {} |", cell.stream, cell.index);
                    for speed in cell.speeds {
                        let _ = write!(out, " {speed:.2} |");
                    }
                    out.push('\n');
                }
            }
        }
        out
    }

    fn comparison(&self, out: &mut String, group: &str) {
        let rows = self.rows(group);
        for (rival, name) in RIVALS {
            let title = format!("{group}: speed over {name}'s");
            ratio_table(out, &title, &rows, |row, phase| {
                let rival = row.rival(rival)?;
                Some((row.ratio(rival, phase), None))
            });
        }
        if rows.iter().any(|row| row.others.len() > RIVALS.len()) {
            let title = format!("{group}: speed over the best rival's");
            ratio_table(out, &title, &rows, |row, phase| {
                let best = row.best(phase)?;
                Some((row.ratio(best, phase), Some(best.index.clone())))
            });
        }
        footprint_table(out, group, &rows);
    }

    /// The ratios to the two rivals that every stream has. First group only.
    pub fn svg(&self) -> String {
        let group = self.groups()[0];
        let rows = self.rows(group);
        let dots = |rival: &str, phase: usize| -> Dots {
            let dot = |row: &Row<'_>| {
                let ratio = row.ratio(row.rival(rival)?, phase);
                Some((ratio, row.subject.stream.clone()))
            };
            rows.iter().filter_map(dot).collect()
        };
        let operation = |(phase, name)| (name, RIVALS.map(|(rival, _)| dots(rival, phase)));
        let operations: Vec<_> = PHASES.into_iter().enumerate().map(operation).collect();
        let title = "How many times as fast as the rival: a dot for each stream, a bar at the geometric mean";
        plot::ratios(title, RIVALS.map(|(_, name)| name), &operations)
    }
}

/// The head of a table whose first column is the stream.
fn heading(out: &mut String, title: &str, columns: &[&str]) {
    let _ = writeln!(
        out,
        "\n**{title}**\n\n| stream | {} |\n|---|{}",
        columns.join(" | "),
        "---|".repeat(columns.len())
    );
}

/// Ratios per stream, losses in bold, and their geometric means.
fn ratio_table(
    out: &mut String,
    title: &str,
    rows: &[Row<'_>],
    ratio: impl Fn(&Row<'_>, usize) -> Option<(f64, Option<String>)>,
) {
    heading(out, title, &PHASES);
    for row in rows {
        let _ = write!(out, "| {} |", row.subject.stream);
        for phase in 0..PHASES.len() {
            let Some((ratio, name)) = ratio(row, phase) else {
                out.push_str(" |");
                continue;
            };
            let name = name.map(|name| format!(" ({name})")).unwrap_or_default();
            let _ = if ratio < 1.0 {
                write!(out, " **{ratio:.2}**{name} |")
            } else {
                write!(out, " {ratio:.2}{name} |")
            };
        }
        out.push('\n');
    }
    if rows.len() > 1 {
        out.push_str("| *geometric mean* |");
        for phase in 0..PHASES.len() {
            let ratios = rows.iter().filter_map(|row| ratio(row, phase));
            let mean = geometric_mean(ratios.map(|(ratio, _)| ratio)).unwrap_or(f64::NAN);
            let _ = write!(out, " {mean:.2} |");
        }
        out.push('\n');
    }
}

/// Bytes per key and insert latencies: the subject's, then the two rivals'.
fn footprint_table(out: &mut String, group: &str, rows: &[Row<'_>]) {
    let title =
        format!("{group}: heap bytes per key after Load, and microseconds of single inserts");
    let columns = [
        "keys",
        "bytes/key: dytis, brie, std",
        "p99.9: dytis, brie, std",
        "longest: dytis, brie, std",
    ];
    heading(out, &title, &columns);
    for row in rows {
        let _ = write!(out, "| {} | {} |", row.subject.stream, row.subject.keys);
        let cells = [Some(row.subject), row.rival("brie"), row.rival("std")];
        let measures: [fn(&Cell) -> String; 3] = [
            |cell| format!("{:.1}", cell.bytes_per_key),
            |cell| format!("{:.1}", cell.p999_us),
            |cell| format!("{:.0}", cell.max_us),
        ];
        for measure in measures {
            let numbers = cells.map(|cell| cell.map_or_else(|| "-".to_owned(), measure));
            let _ = write!(out, " {} |", numbers.join(", "));
        }
        out.push('\n');
    }
}

/// The comment line that stands above the results of a run.
pub fn header(rounds: usize) -> String {
    let runs = if rounds == 1 {
        "one round".to_owned()
    } else {
        format!("median of {rounds} rounds")
    };
    format!("# {}, one thread, {runs}, commit {}", machine(), commit())
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
