//! A plot of ratios as plain SVG.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::fmt::Write as _;

/// Ratios to one rival, each with the name of its stream.
pub type Dots = Vec<(f64, String)>;

const COLOURS: [&str; 2] = ["#1f5fa8", "#c0611a"];
const LEFT: f64 = 64.0;
const WIDTH: f64 = 560.0;
const TOP: f64 = 74.0;
const HEIGHT: f64 = 40.0;
const LEAST: f64 = 0.25;
const MOST: f64 = 16.0;

/// Two lines of dots for each operation, one for each of two rivals, on a logarithmic axis, and a bar
/// at the geometric mean of a line.
pub fn ratios(title: &str, rivals: [&str; 2], operations: &[(&str, [Dots; 2])]) -> String {
    let bottom = TOP + HEIGHT * operations.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 700 {0}\" width=\"700\" height=\"{0}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"15\">{title}</text>\n",
        bottom + 34.0
    );
    for (number, name) in rivals.into_iter().enumerate() {
        let x = LEFT + 120.0 * number as f64;
        let _ = writeln!(
            out,
            "<circle cx=\"{x}\" cy=\"42\" r=\"4.5\" fill=\"{}\"/><text x=\"{}\" y=\"46\">{name}</text>",
            COLOURS[number],
            x + 10.0
        );
    }
    axis(&mut out, bottom);
    for (row, (operation, lines)) in operations.iter().enumerate() {
        let middle = TOP + HEIGHT * (row as f64 + 0.5);
        let _ = writeln!(
            out,
            "<text x=\"12\" y=\"{}\">{operation}</text>",
            middle + 4.0
        );
        for ((dots, colour), y) in lines.iter().zip(COLOURS).zip([middle - 7.0, middle + 8.0]) {
            line(&mut out, operation, dots, colour, y);
        }
    }
    out.push_str("</svg>\n");
    out
}

/// Where a ratio lies; ratios beyond the axis lie at its ends.
fn x(ratio: f64) -> f64 {
    LEFT + WIDTH * (ratio.clamp(LEAST, MOST) / LEAST).ln() / (MOST / LEAST).ln()
}

fn axis(out: &mut String, bottom: f64) {
    let mut tick = LEAST;
    while tick <= MOST {
        let colour = if tick == 1.0 { "#444" } else { "#ddd" };
        let _ = writeln!(
            out,
            "<line x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" stroke=\"{colour}\"/>\
             <text x=\"{0:.1}\" y=\"{1}\" text-anchor=\"middle\">{tick}</text>",
            x(tick),
            bottom + 18.0
        );
        tick *= 2.0;
    }
}

fn line(out: &mut String, operation: &str, dots: &Dots, colour: &str, y: f64) {
    for (ratio, stream) in dots {
        let _ = writeln!(
            out,
            "<circle cx=\"{:.1}\" cy=\"{y}\" r=\"4.5\" fill=\"{colour}\" fill-opacity=\"0.55\">\
             <title>{operation}, {stream}: {ratio:.2}</title></circle>",
            x(*ratio)
        );
    }
    if let Some(mean) = geometric_mean(dots.iter().map(|(ratio, _)| *ratio)) {
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{}\" width=\"3\" height=\"13\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"{}\" font-size=\"11\" fill=\"{colour}\">{mean:.2}</text>",
            x(mean) - 1.5,
            y - 6.5,
            LEFT + WIDTH + 14.0,
            y + 4.0
        );
    }
}

/// `None` of nothing.
pub fn geometric_mean(ratios: impl IntoIterator<Item = f64>) -> Option<f64> {
    let logs: Vec<f64> = ratios.into_iter().map(f64::ln).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}
