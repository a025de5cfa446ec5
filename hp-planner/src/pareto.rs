//! The Pareto front over time and money, and the rules that choose one point on it.
//!
//! Both coordinates are minimised. A point dominates another when it is no worse in both and better in one. The
//! front keeps what nothing dominates; of several points with equal time *and* cost it keeps the one whose payload
//! is least, so that the result depends on the set of points inserted and never on their order.
#![allow(
    clippy::float_cmp,
    reason = "a tie on the front means equal in every bit"
)]

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::Error;

/// Normalised distances closer than this count as equal, so that changing the units (which moves the last bits of
/// every coordinate) cannot change which point is the knee.
const TIE: f64 = 1e-12;

/// One point of a [`ParetoFront`]: what it takes in time and money, and what it stands for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FrontPoint<T> {
    /// Time; seconds throughout this crate, though the front itself only compares.
    pub time: f64,
    /// Money, in the currency of the cluster's prices.
    pub cost: f64,
    /// What the point stands for, usually a plan.
    pub payload: T,
}

/// The set of points that no other point dominates, ordered from the fastest to the cheapest.
///
/// # Examples
/// ```
/// use hp_planner::{Objective, ParetoFront};
///
/// let mut front = ParetoFront::new();
/// front.insert(10.0, 4.0, "eight GPUs")?;
/// front.insert(20.0, 3.0, "four GPUs")?;
/// assert!(!front.insert(25.0, 3.5, "four slow GPUs")?);
/// assert!(front.dominates(25.0, 3.5));
/// assert_eq!(front.select(Objective::Cheapest)?.point.payload, "four GPUs");
///
/// let choice = front.select(Objective::Budget(2.5))?;
/// assert_eq!(choice.point.payload, "four GPUs");
/// assert_eq!(choice.shortfall, Some(0.5));
/// # Ok::<(), hp_planner::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ParetoFront<T> {
    /// Strictly increasing in time and strictly decreasing in cost.
    points: Vec<FrontPoint<T>>,
}

impl<T> Default for ParetoFront<T> {
    fn default() -> Self {
        Self { points: Vec::new() }
    }
}

impl<T> ParetoFront<T> {
    /// An empty front.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of points on the front.
    pub fn len(&self) -> usize {
        self.points.len()
    }

    /// Whether the front has no point.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// The points from the fastest (and dearest) to the slowest (and cheapest).
    pub fn iter(&self) -> std::slice::Iter<'_, FrontPoint<T>> {
        self.points.iter()
    }

    /// The points as a slice, in the order of [`iter`](Self::iter).
    pub fn points(&self) -> &[FrontPoint<T>] {
        &self.points
    }

    /// The points themselves, in the order of [`iter`](Self::iter).
    pub fn into_points(self) -> Vec<FrontPoint<T>> {
        self.points
    }

    /// Whether some point of the front is no worse than `(time, cost)` in both and better in one.
    ///
    /// A point that ties with one of the front in both is *not* dominated. NaN is dominated by nothing.
    /// Computes in O(log n).
    pub fn dominates(&self, time: f64, cost: f64) -> bool {
        // Cost falls along the front, so the last point that is not slower is the cheapest of those.
        let end = self.points.partition_point(|p| p.time <= time);
        self.points[..end]
            .last()
            .is_some_and(|p| p.cost < cost || (p.cost == cost && p.time < time))
    }

    /// The same front with every payload replaced by what `f` makes of it.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> ParetoFront<U> {
        let points = self.points.into_iter();
        ParetoFront {
            points: points
                .map(|p| FrontPoint {
                    time: p.time,
                    cost: p.cost,
                    payload: f(p.payload),
                })
                .collect(),
        }
    }

    /// The least subset that still holds the fastest and the cheapest point and, for every point left out, one that
    /// is at most `1 + epsilon` times as slow and as dear (multiplicative epsilon-dominance, Laumanns et al. 2002).
    ///
    /// It is computed on the finished front, therefore unlike thinning during insertion it does not depend on the
    /// order of insertion. `epsilon` 0 keeps everything. Computes in O(n).
    ///
    /// # Errors
    /// [`Error::ObjectiveValue`] if `epsilon` is negative or not finite.
    pub fn thinned(mut self, epsilon: f64) -> Result<Self, Error> {
        let reach = 1.0 + checked_rule("epsilon", epsilon)?;
        let all = std::mem::take(&mut self.points);
        let last = all.len().saturating_sub(1);
        let mut keep = vec![false; all.len()];
        let mut next = 0;
        while next < all.len() {
            // Of the points that cover `next`, the cheapest reaches furthest along the front.
            let mut chosen = next;
            if next > 0 {
                while chosen < last && all[chosen + 1].time <= all[next].time * reach {
                    chosen += 1;
                }
            }
            keep[chosen] = true;
            next = chosen + 1;
            while next < last && all[chosen].cost <= all[next].cost * reach {
                next += 1;
            }
        }
        self.points = all
            .into_iter()
            .zip(keep)
            .filter_map(|(p, keep)| keep.then_some(p))
            .collect();
        Ok(self)
    }

    /// The point that `objective` asks for.
    ///
    /// If no point keeps a budget or a deadline, the answer is the point that comes closest (the cheapest, the
    /// fastest) and [`Selection::shortfall`] says by how much it misses. Equal scores go to the cheaper point.
    /// Computes in O(n).
    ///
    /// # Errors
    /// [`Error::EmptyFront`] if there is no point, [`Error::ObjectiveValue`] if a number of the objective is negative
    /// or not finite, or if both weights are zero.
    pub fn select(&self, objective: Objective) -> Result<Selection<'_, T>, Error> {
        objective.validate()?;
        let (Some(fastest), Some(cheapest)) = (self.points.first(), self.points.last()) else {
            return Err(Error::EmptyFront);
        };
        let last = self.points.len() - 1;
        let mut shortfall = None;
        let index = match objective {
            Objective::Fastest => 0,
            Objective::Cheapest => last,
            Objective::Budget(money) => {
                let first = self.points.partition_point(|p| p.cost > money);
                if first > last {
                    shortfall = Some(cheapest.cost - money);
                }
                first.min(last)
            }
            Objective::Deadline(time) => {
                let end = self.points.partition_point(|p| p.time <= time);
                if end == 0 {
                    shortfall = Some(fastest.time - time);
                }
                end.saturating_sub(1)
            }
            Objective::Knee => self.least(|time, cost| time + cost),
            Objective::Weighted { time: wt, cost: wc } => {
                let scale = wt.max(wc);
                self.least(|time, cost| (wt / scale) * time + (wc / scale) * cost)
            }
            Objective::MinProduct => {
                let product = |p: &FrontPoint<T>| p.time * p.cost;
                let best = self
                    .points
                    .iter()
                    .map(product)
                    .fold(f64::INFINITY, f64::min);
                self.points
                    .iter()
                    .rposition(|p| product(p) <= best * (1.0 + TIE))
                    .unwrap_or(last)
            }
        };
        Ok(Selection {
            index,
            point: &self.points[index],
            objective,
            shortfall,
        })
    }

    /// Index of the point with the least `score` of normalised time and cost, each 0 at its best and 1 at its worst;
    /// of equal scores the cheapest.
    ///
    /// With `score = time + cost` this is the knee: the chord from (0, 1) to (1, 0) is `time + cost = 1`, and the
    /// distance from it towards the ideal corner is `(1 - time - cost) / sqrt(2)`.
    fn least(&self, score: impl Fn(f64, f64) -> f64) -> usize {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            return 0;
        };
        let scores: Vec<f64> = self
            .points
            .iter()
            .map(|p| {
                score(
                    unit(p.time, first.time, last.time),
                    unit(p.cost, last.cost, first.cost),
                )
            })
            .collect();
        let best = scores.iter().copied().fold(f64::INFINITY, f64::min);
        scores.iter().rposition(|s| *s <= best + TIE).unwrap_or(0)
    }
}

impl<T: Ord> ParetoFront<T> {
    /// Offers a point; returns whether it is on the front now.
    ///
    /// Points that it dominates leave. A point with the same time and cost stays only if its payload is less.
    /// Computes in O(log n) comparisons plus moving what lies behind the place of insertion.
    ///
    /// # Errors
    /// [`Error::FrontValue`] if `time` or `cost` is negative or not finite; the front is unchanged then.
    pub fn insert(&mut self, time: f64, cost: f64, payload: T) -> Result<bool, Error> {
        self.insert_by(time, cost, payload, T::cmp)
    }

    /// Offers every point of `other`; the result is the front of the union.
    pub fn merge(&mut self, other: Self) {
        for FrontPoint {
            time,
            cost,
            payload,
        } in other.points
        {
            self.place(
                FrontPoint {
                    time,
                    cost,
                    payload,
                },
                T::cmp,
            );
        }
    }
}

impl<T> ParetoFront<T> {
    /// [`insert`](Self::insert) for payloads without an order of their own: `order` decides between payloads of
    /// equal time and cost, and should be total if the result is not to depend on the order of insertion.
    ///
    /// # Errors
    /// As [`insert`](Self::insert).
    pub fn insert_by(
        &mut self,
        time: f64,
        cost: f64,
        payload: T,
        order: impl FnOnce(&T, &T) -> Ordering,
    ) -> Result<bool, Error> {
        let (time, cost) = (checked_point("time", time)?, checked_point("cost", cost)?);
        Ok(self.place(
            FrontPoint {
                time,
                cost,
                payload,
            },
            order,
        ))
    }

    fn place(&mut self, new: FrontPoint<T>, order: impl FnOnce(&T, &T) -> Ordering) -> bool {
        if self.dominates(new.time, new.cost) {
            return false;
        }
        let start = self.points.partition_point(|p| p.time < new.time);
        if let Some(tied) = self.points.get_mut(start)
            && tied.time == new.time
            && tied.cost == new.cost
        {
            let less = order(&new.payload, &tied.payload).is_lt();
            if less {
                *tied = new;
            }
            return less;
        }
        let end = start + self.points[start..].partition_point(|p| p.cost >= new.cost);
        self.points.splice(start..end, [new]);
        true
    }
}

impl<'a, T> IntoIterator for &'a ParetoFront<T> {
    type Item = &'a FrontPoint<T>;
    type IntoIter = std::slice::Iter<'a, FrontPoint<T>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: Serialize> Serialize for ParetoFront<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.points.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for ParetoFront<T> {
    /// Reads a list of points and refuses one that is not a front in order.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let points = Vec::<FrontPoint<T>>::deserialize(deserializer)?;
        for p in &points {
            checked_point("time", p.time)
                .and(checked_point("cost", p.cost))
                .map_err(de::Error::custom)?;
        }
        if let Some(at) = points
            .windows(2)
            .position(|w| w[0].time >= w[1].time || w[0].cost <= w[1].cost)
        {
            return Err(de::Error::custom(Error::FrontOrder { at: at + 1 }));
        }
        Ok(Self { points })
    }
}

/// What [`ParetoFront::select`] chose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Selection<'a, T> {
    /// Position of the point on the front, from the fastest.
    pub index: usize,
    /// The point.
    pub point: &'a FrontPoint<T>,
    /// The rule that chose it.
    pub objective: Objective,
    /// By how much the point misses the budget (money) or the deadline (time); `None` if it keeps it.
    pub shortfall: Option<f64>,
}

/// The rule that picks one point of a front.
///
/// Written as text (command lines, files) it is `fastest`, `cheapest`, `knee`, `budget=120.5`, `deadline=3600`,
/// `weighted=0.7,0.3` (time, cost) or `min-product`.
///
/// # Examples
/// ```
/// use hp_planner::Objective;
///
/// assert_eq!("budget=12.5".parse::<Objective>()?, Objective::Budget(12.5));
/// assert_eq!(Objective::Weighted { time: 1.0, cost: 2.0 }.to_string(), "weighted=1,2");
/// # Ok::<(), hp_planner::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// Least time.
    Fastest,
    /// Least money.
    Cheapest,
    /// The point furthest from the chord between the fastest and the cheapest, towards the ideal corner, after both
    /// coordinates are scaled to `0..=1` over the front; ties, and a front of two points, go to the cheaper.
    #[default]
    Knee,
    /// Least time at no more than this much money.
    Budget(f64),
    /// Least money in no more than this much time.
    Deadline(f64),
    /// Least weighted sum of the coordinates scaled to `0..=1` over the front.
    Weighted {
        /// Weight of the scaled time.
        time: f64,
        /// Weight of the scaled cost.
        cost: f64,
    },
    /// Least product of time and money.
    MinProduct,
}

impl Objective {
    /// Checks the numbers that the rule carries.
    ///
    /// # Errors
    /// [`Error::ObjectiveValue`] if one is negative or not finite, or if both weights are zero.
    pub fn validate(self) -> Result<(), Error> {
        match self {
            Self::Budget(money) => checked_rule("budget", money)?,
            Self::Deadline(time) => checked_rule("deadline", time)?,
            Self::Weighted { time, cost } => {
                checked_rule("weight of time", time)?;
                checked_rule("weight of cost", cost)?;
                if time == 0.0 && cost == 0.0 {
                    return Err(Error::ObjectiveValue {
                        what: "sum of the weights",
                        value: 0.0,
                    });
                }
                0.0
            }
            Self::Fastest | Self::Cheapest | Self::Knee | Self::MinProduct => 0.0,
        };
        Ok(())
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fastest => f.write_str("fastest"),
            Self::Cheapest => f.write_str("cheapest"),
            Self::Knee => f.write_str("knee"),
            Self::Budget(money) => write!(f, "budget={money}"),
            Self::Deadline(time) => write!(f, "deadline={time}"),
            Self::Weighted { time, cost } => write!(f, "weighted={time},{cost}"),
            Self::MinProduct => f.write_str("min-product"),
        }
    }
}

impl FromStr for Objective {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let syntax = || Error::ObjectiveSyntax {
            got: text.to_owned(),
        };
        let number = |s: &str| s.trim().parse::<f64>().map_err(|_| syntax());
        let (name, value) = text
            .split_once('=')
            .map_or((text, None), |(name, value)| (name, Some(value)));
        let objective = match (name.trim(), value) {
            ("fastest", None) => Self::Fastest,
            ("cheapest", None) => Self::Cheapest,
            ("knee", None) => Self::Knee,
            ("min-product", None) => Self::MinProduct,
            ("budget", Some(value)) => Self::Budget(number(value)?),
            ("deadline", Some(value)) => Self::Deadline(number(value)?),
            ("weighted", Some(value)) => {
                let (time, cost) = value.split_once(',').ok_or_else(syntax)?;
                Self::Weighted {
                    time: number(time)?,
                    cost: number(cost)?,
                }
            }
            _ => return Err(syntax()),
        };
        objective.validate()?;
        Ok(objective)
    }
}

/// `value` mapped so that `best` is 0 and `worst` is 1; 0 where both are the same.
fn unit(value: f64, best: f64, worst: f64) -> f64 {
    if worst > best {
        (value - best) / (worst - best)
    } else {
        0.0
    }
}

/// A coordinate of a point; negative zero becomes zero so that equal points are equal in every bit.
fn checked_point(what: &'static str, value: f64) -> Result<f64, Error> {
    if value.is_finite() && value >= 0.0 {
        Ok(value + 0.0)
    } else {
        Err(Error::FrontValue { what, value })
    }
}

fn checked_rule(what: &'static str, value: f64) -> Result<f64, Error> {
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(Error::ObjectiveValue { what, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn front(points: &[(f64, f64)]) -> ParetoFront<usize> {
        let mut front = ParetoFront::new();
        for (i, &(time, cost)) in points.iter().enumerate() {
            front.insert(time, cost, i).unwrap();
        }
        front
    }

    #[test]
    fn knee_is_the_point_furthest_below_the_chord() {
        let f = front(&[(0.0, 10.0), (1.0, 4.0), (4.0, 3.0), (10.0, 0.0)]);
        assert_eq!(f.select(Objective::Knee).unwrap().index, 1);
        // A bulge above the chord is the opposite of a knee: the cheaper end wins.
        let f = front(&[(0.0, 10.0), (9.0, 9.0), (10.0, 0.0)]);
        assert_eq!(f.select(Objective::Knee).unwrap().index, 2);
        // Two points at equal distance: the cheaper.
        let f = front(&[(0.0, 10.0), (1.0, 4.0), (4.0, 1.0), (10.0, 0.0)]);
        assert_eq!(f.select(Objective::Knee).unwrap().index, 2);
    }

    #[test]
    fn every_rule_on_one_front() {
        let f = front(&[(1.0, 9.0), (2.0, 5.0), (4.0, 4.0), (9.0, 1.0)]);
        let index = |o| f.select(o).unwrap().index;
        assert_eq!(index(Objective::Fastest), 0);
        assert_eq!(index(Objective::Cheapest), 3);
        assert_eq!(index(Objective::Budget(5.0)), 1);
        assert_eq!(index(Objective::Budget(4.9)), 2);
        assert_eq!(index(Objective::Deadline(8.9)), 2);
        assert_eq!(
            index(Objective::Weighted {
                time: 1.0,
                cost: 0.0
            }),
            0
        );
        assert_eq!(
            index(Objective::Weighted {
                time: 0.0,
                cost: 1.0
            }),
            3
        );
        assert_eq!(
            index(Objective::Weighted {
                time: 2.0,
                cost: 1.0
            }),
            1
        );
        assert_eq!(index(Objective::MinProduct), 3);
    }

    #[test]
    fn unreachable_limits_say_by_how_much() {
        let f = front(&[(1.0, 9.0), (9.0, 1.0)]);
        let s = f.select(Objective::Budget(0.25)).unwrap();
        assert_eq!((s.index, s.shortfall), (1, Some(0.75)));
        let s = f.select(Objective::Deadline(0.5)).unwrap();
        assert_eq!((s.index, s.shortfall), (0, Some(0.5)));
        assert_eq!(f.select(Objective::Deadline(1.0)).unwrap().shortfall, None);
    }

    #[test]
    fn bad_numbers_are_refused_by_name() {
        let mut f = front(&[]);
        assert_eq!(f.select(Objective::Knee), Err(Error::EmptyFront));
        for bad in [f64::NAN, -1.0, f64::INFINITY] {
            assert!(matches!(
                f.insert(bad, 1.0, 0),
                Err(Error::FrontValue { what: "time", .. })
            ));
            assert!(matches!(
                f.insert(1.0, bad, 0),
                Err(Error::FrontValue { what: "cost", .. })
            ));
            assert!(matches!(
                f.select(Objective::Budget(bad)),
                Err(Error::ObjectiveValue { what: "budget", .. })
            ));
        }
        assert!(f.is_empty());
        assert!(matches!(
            "weighted=0,0".parse::<Objective>(),
            Err(Error::ObjectiveValue { .. })
        ));
        assert!(matches!(
            "budget".parse::<Objective>(),
            Err(Error::ObjectiveSyntax { .. })
        ));
        assert!(matches!(
            "budget=ten".parse::<Objective>(),
            Err(Error::ObjectiveSyntax { .. })
        ));
    }

    #[test]
    fn serde_round_trip_and_refusal() {
        let f = front(&[(1.0, 9.0), (9.0, 1.0)]);
        let text = serde_json::to_string(&f).unwrap();
        assert_eq!(
            serde_json::from_str::<ParetoFront<usize>>(&text).unwrap(),
            f
        );
        let bad = r#"[{"time":1.0,"cost":1.0,"payload":0},{"time":2.0,"cost":1.0,"payload":1}]"#;
        assert!(
            serde_json::from_str::<ParetoFront<usize>>(bad)
                .unwrap_err()
                .to_string()
                .contains("point 1")
        );
        for o in [
            Objective::Knee,
            Objective::Budget(2.5),
            Objective::Weighted {
                time: 0.1,
                cost: 3.0,
            },
        ] {
            assert_eq!(o.to_string().parse::<Objective>().unwrap(), o);
            let text = serde_json::to_string(&o).unwrap();
            assert_eq!(serde_json::from_str::<Objective>(&text).unwrap(), o);
        }
    }
}
