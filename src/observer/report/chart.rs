//! Line charts as inline SVG.

use plotters::coord::Shift;
use plotters::prelude::*;
use std::error::Error as StdError;

/// How a series is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mark {
    Line,
    Dots,
    Ring,
}

/// Points with a look.
#[derive(Debug, Clone)]
pub(super) struct Series {
    name: Option<String>,
    points: Vec<(f64, f64)>,
    mark: Mark,
    colour: Option<usize>,
}

impl Series {
    /// A line with an entry in the legend.
    pub(super) fn line(name: &str, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: Some(name.to_owned()),
            points,
            mark: Mark::Line,
            colour: None,
        }
    }

    /// Small filled dots.
    pub(super) fn dots(points: Vec<(f64, f64)>) -> Self {
        Self {
            name: None,
            points,
            mark: Mark::Dots,
            colour: None,
        }
    }

    /// Large rings that point something out.
    pub(super) fn marks(points: Vec<(f64, f64)>) -> Self {
        Self {
            name: None,
            points,
            mark: Mark::Ring,
            colour: None,
        }
    }

    /// The colour of the `index`-th line instead of this series' own.
    pub(super) fn with_colour(mut self, index: usize) -> Self {
        self.colour = Some(index);
        self
    }
}

/// A chart with a title and two linear axes.
#[derive(Debug)]
pub(super) struct Chart {
    title: String,
    x: String,
    y: String,
    series: Vec<Series>,
}

const COLOURS: [RGBColor; 4] = [
    RGBColor(31, 90, 168),
    RGBColor(214, 96, 30),
    RGBColor(60, 140, 70),
    RGBColor(180, 30, 60),
];

impl Chart {
    pub(super) fn new(title: &str, x: &str, y: &str) -> Self {
        Self {
            title: title.to_owned(),
            x: x.to_owned(),
            y: y.to_owned(),
            series: Vec::new(),
        }
    }

    pub(super) fn with_series(mut self, series: impl IntoIterator<Item = Series>) -> Self {
        self.series.extend(series);
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        self.series.iter().all(|s| s.points.is_empty())
    }

    /// The chart as an HTML figure; a chart that cannot be drawn says so in its place.
    pub(super) fn figure(&self) -> String {
        let mut svg = String::new();
        let drawn = self.draw(&SVGBackend::with_string(&mut svg, (640, 360)).into_drawing_area());
        match drawn {
            Ok(()) => format!("<figure>{svg}</figure>\n"),
            Err(e) => format!(
                "<figure><figcaption>{}: not drawn ({e})</figcaption></figure>\n",
                self.title
            ),
        }
    }

    /// Smallest and largest finite coordinates with a margin; a unit box where there are none.
    fn bounds(&self) -> (std::ops::Range<f64>, std::ops::Range<f64>) {
        let axis = |pick: fn(&(f64, f64)) -> f64| {
            let values = self
                .series
                .iter()
                .flat_map(|s| &s.points)
                .map(pick)
                .filter(|v| v.is_finite());
            let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| {
                (l.min(v), h.max(v))
            });
            if low > high {
                return 0.0..1.0;
            }
            let margin = if high > low {
                0.04 * (high - low)
            } else {
                0.5 * high.abs().max(1e-9)
            };
            low - margin..high + margin
        };
        (axis(|p| p.0), axis(|p| p.1))
    }

    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), Box<dyn StdError>> {
        let (x, y) = self.bounds();
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 17))
            .margin(8)
            .x_label_area_size(38)
            .y_label_area_size(62)
            .build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc(&self.x)
            .y_desc(&self.y)
            .x_label_formatter(&|v| short(*v))
            .y_label_formatter(&|v| short(*v))
            .draw()?;
        for (i, s) in self.series.iter().enumerate() {
            let colour = COLOURS[s.colour.unwrap_or(i) % COLOURS.len()];
            let finite = s
                .points
                .iter()
                .copied()
                .filter(|p| p.0.is_finite() && p.1.is_finite());
            match s.mark {
                Mark::Line => {
                    let drawn =
                        chart.draw_series(LineSeries::new(finite, colour.stroke_width(2)))?;
                    if let Some(name) = &s.name {
                        drawn.label(name).legend(move |(x, y)| {
                            PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2))
                        });
                    }
                }
                Mark::Dots => {
                    chart.draw_series(finite.map(|p| Circle::new(p, 3, colour.filled())))?;
                }
                Mark::Ring => {
                    chart.draw_series(finite.map(|p| Circle::new(p, 8, colour.stroke_width(3))))?;
                }
            }
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .position(SeriesLabelPosition::UpperRight)
            .draw()?;
        area.present()?;
        Ok(())
    }
}

/// A tick label: as few digits as tell the ticks apart.
fn short(v: f64) -> String {
    let magnitude = v.abs();
    if magnitude >= 1e4 {
        format!("{:.0}k", v / 1e3)
    } else if magnitude >= 100.0 || v == 0.0 {
        format!("{v:.0}")
    } else if magnitude >= 1.0 {
        format!("{v:.1}")
    } else if magnitude >= 1e-2 {
        format!("{v:.3}")
    } else {
        format!("{v:.1e}")
    }
}
