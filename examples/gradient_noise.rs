//! Measures the gradient of a small network over training and draws its similarity, noise scale and diversity.
//!
//! `cargo run --release --example gradient_noise` trains on 8 x 8 digits with batches of 64 in eight micro-batches and writes
//! `target/gradient_noise.svg`: three curves over the epochs, each smoothed with a half-life of 20 steps.

#![expect(clippy::print_stdout, reason = "the program's output")]

#[path = "support/digits.rs"]
mod digits;

use std::fmt::Write as _;
use std::path::Path;

use adaptive_batch::EmaEstimator;
use digits::{Adam, Data, Network, Shuffle};

const EPOCHS: u64 = 30;
const BATCH: u64 = 64;

/// One curve: what it shows, and its points (epoch, value).
struct Curve {
    title: &'static str,
    logarithmic: bool,
    points: Vec<(f64, f64)>,
}

fn main() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let data = Data::read(&root.join("examples/data/digits8x8"))?;
    let mut network = Network::new(1);
    let mut adam = Adam::new(&network);
    let mut meter = digits::meter()?;
    let mut ema = EmaEstimator::with_half_life(20.0)?;
    let mut shuffle = Shuffle::new(data.train.len(), 1);
    let curve = |title, logarithmic| Curve {
        title,
        logarithmic,
        points: Vec::new(),
    };
    let mut curves = [
        curve("mean pairwise similarity of 8 micro-batches", false),
        curve("gradient noise scale (samples)", true),
        curve("diversity of 8 micro-batches", false),
    ];
    let (mut samples, mut next_line) = (0, 0);
    println!(
        "{:>6} {:>9} {:>11} {:>12} {:>10} {:>11}",
        "epoch", "test %", "similarity", "noise scale", "diversity", "confidence"
    );
    while samples < EPOCHS * data.train.len() as u64 {
        let chosen = shuffle.take(BATCH as usize);
        let (gradient, stats) = digits::gradient(&network, &data, &chosen, &mut meter)?;
        adam.step(&mut network, &gradient, 0.004);
        samples += BATCH;
        let estimate = ema.observe(&stats)?;
        let epoch = samples as f64 / data.train.len() as f64;
        for (curve, value) in curves.iter_mut().zip([
            estimate.similarity,
            estimate.noise_scale,
            estimate.diversity,
        ]) {
            // The noise scale has no value while |G|^2 drowns in noise.
            if value.is_finite() && (value > 0.0 || !curve.logarithmic) {
                curve.points.push((epoch, value));
            }
        }
        if epoch >= f64::from(next_line) {
            println!(
                "{next_line:>6} {:>9.2} {:>11.3} {:>12.1} {:>10.3} {:>11.2}",
                100.0 * network.accuracy(&data.test),
                estimate.similarity,
                estimate.noise_scale,
                estimate.diversity,
                estimate.confidence
            );
            next_line += 3;
        }
    }
    let folder = root.join("target");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("gradient_noise.svg");
    std::fs::write(&path, draw(&curves)?)?;
    println!("wrote {}", path.display());
    Ok(())
}

/// The curves below each other, with the ends of their axes.
fn draw(curves: &[Curve]) -> anyhow::Result<String> {
    const WIDTH: f64 = 640.0;
    const HEIGHT: f64 = 180.0;
    const MARGIN: f64 = 60.0;
    let total = (HEIGHT + MARGIN) * curves.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {total}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        WIDTH + 2.0 * MARGIN
    );
    for (i, curve) in curves.iter().enumerate() {
        let top = i as f64 * (HEIGHT + MARGIN) + MARGIN / 2.0;
        let scale = |y: f64| if curve.logarithmic { y.ln() } else { y };
        let values = || curve.points.iter().map(|p| p.1);
        let (low, high) = (
            values().fold(f64::INFINITY, f64::min),
            values().fold(f64::NEG_INFINITY, f64::max),
        );
        anyhow::ensure!(low < high, "nothing to draw for the {}", curve.title);
        let last = curve.points.last().map_or(1.0, |p| p.0);
        let points: Vec<String> = curve
            .points
            .iter()
            .map(|(x, y)| {
                let height = (scale(*y) - scale(low)) / (scale(high) - scale(low));
                format!(
                    "{:.1},{:.1}",
                    MARGIN + x / last * WIDTH,
                    top + HEIGHT * (1.0 - height)
                )
            })
            .collect();
        writeln!(
            svg,
            "<text x=\"{MARGIN}\" y=\"{}\" font-weight=\"bold\">{}</text>",
            top - 8.0,
            curve.title
        )?;
        writeln!(
            svg,
            "<rect x=\"{MARGIN}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"none\" stroke=\"#bbb\"/>"
        )?;
        writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            MARGIN - 6.0,
            top + 10.0,
            label(high)
        )?;
        writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            MARGIN - 6.0,
            top + HEIGHT,
            label(low)
        )?;
        writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">epoch {last:.0}</text>",
            MARGIN + WIDTH,
            top + HEIGHT + 16.0
        )?;
        writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"#1f6fb4\" stroke-width=\"1.5\" points=\"{}\"/>",
            points.join(" ")
        )?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

/// Three digits after the point for shares, none for samples.
fn label(value: f64) -> String {
    if value < 10.0 {
        format!("{value:.3}")
    } else {
        format!("{value:.0}")
    }
}
