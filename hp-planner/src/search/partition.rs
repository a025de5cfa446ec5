//! Layers to stages: the contiguous partition whose slowest stage is as fast as possible.

/// Layers per stage, at least one each, such that the greatest stage time is least; `None` if there are more stages than
/// layers.
///
/// `prefix[s][l]` is the time that the first `l` layers take on the devices of stage `s`; it starts with 0 and never falls.
/// Of the partitions with the least bottleneck the one with the fewest layers in front is returned, because the first
/// stages of a pipeline hold the activations of the most micro-batches.
///
/// The least bottleneck is the time of some range of layers on some stage. A test that fails says which such time is the
/// least that could change its outcome, so that few tests lead to the exact value; every third one halves the interval,
/// which bounds their number. A test takes O(s log l), or O(s l) where a layer is too heavy for some stage.
pub(super) fn bottleneck(prefix: &[&[f64]]) -> Option<Vec<u32>> {
    let stages = prefix.len();
    let layers = prefix.first()?.len() - 1;
    if stages > layers {
        return None;
    }
    let rows = Rows::new(prefix);
    // A partition into nearly equal counts gives the upper end.
    let mut best = even(stages, layers);
    let mut high = slowest(prefix, &best);
    let mut low = rows.mean / stages as f64 * (1.0 - 1e-9);
    let mut tests = 0;
    while low < high {
        tests += 1;
        let halfway = low + (high - low) / 2.0;
        let time = if tests % 3 == 0 && halfway < high {
            halfway
        } else {
            low
        };
        match rows.fill(prefix, time) {
            Ok(found) => {
                high = slowest(prefix, &found);
                best = found;
            }
            Err(next) => low = next,
        }
    }
    // The same rule for the bottleneck found, also where the even partition was best already.
    Some(rows.fill(prefix, high).unwrap_or(best))
}

/// The time of the slowest stage.
pub(super) fn slowest(prefix: &[&[f64]], layers: &[u32]) -> f64 {
    let mut first = 0;
    let mut most = 0.0_f64;
    for (stage, &count) in prefix.iter().zip(layers) {
        let end = first + count as usize;
        most = most.max(stage[end] - stage[first]);
        first = end;
    }
    most
}

fn even(stages: usize, layers: usize) -> Vec<u32> {
    (0..stages)
        .map(|stage| ((stage + 1) * layers / stages - stage * layers / stages) as u32)
        .collect()
}

/// What the distinct rows of times have in common.
struct Rows {
    /// Sum over the layers of the time on the stage that is fastest for it: with `s` stages no bottleneck is below its
    /// `s`-th part.
    mean: f64,
    /// Greatest time of a single layer, the first and the last not counted, on any stage.
    heaviest: f64,
}

impl Rows {
    fn new(prefix: &[&[f64]]) -> Self {
        let mut distinct = prefix.to_vec();
        distinct.dedup_by(|a, b| std::ptr::eq(*a, *b));
        let layers = distinct[0].len() - 1;
        let (mut mean, mut heaviest) = (0.0, 0.0_f64);
        for l in 0..layers {
            let mut least = f64::INFINITY;
            for row in &distinct {
                let time = row[l + 1] - row[l];
                least = least.min(time);
                if l > 0 && l + 1 < layers {
                    heaviest = heaviest.max(time);
                }
            }
            mean += least;
        }
        Self { mean, heaviest }
    }

    /// A partition in which no stage takes longer than `time`, with the fewest layers in front; or, if there is none, the
    /// least time above for which a test can come out otherwise.
    ///
    /// Taking as much as fits from the back is right if every layer fits alone everywhere: then the stages in front can
    /// finish fewer layers if they can finish more, because a stage whose layers were taken away gets the last one that is
    /// left before it. This last one is never the model's first layer, nor its last.
    fn fill(&self, prefix: &[&[f64]], time: f64) -> Result<Vec<u32>, f64> {
        if self.heaviest <= time || prefix.iter().all(|row| std::ptr::eq(*row, prefix[0])) {
            from_the_back(prefix, time)
        } else {
            reachable(prefix, time)
        }
    }
}

/// Each stage takes as many layers from the back as fit, which leaves the least for the others.
fn from_the_back(prefix: &[&[f64]], time: f64) -> Result<Vec<u32>, f64> {
    let mut counts = vec![0; prefix.len()];
    let mut end = prefix[0].len() - 1;
    let mut next = f64::INFINITY;
    for (index, stage) in prefix.iter().enumerate().rev() {
        let fits = stage.partition_point(|&t| stage[end] - t > time);
        if fits > index {
            next = next.min(stage[end] - stage[fits - 1]);
        }
        // Every stage before this one needs a layer.
        let first = fits.max(index);
        if first >= end {
            return Err(next);
        }
        counts[index] = (end - first) as u32;
        end = first;
    }
    if end == 0 { Ok(counts) } else { Err(next) }
}

/// Taking as much as fits can leave a heavy layer to a slow stage because every stage needs a layer, so all boundaries
/// from which the stages behind can finish are followed.
fn reachable(prefix: &[&[f64]], time: f64) -> Result<Vec<u32>, f64> {
    let layers = prefix[0].len() - 1;
    let width = layers + 1;
    let mut open = vec![false; (prefix.len() + 1) * width];
    open[prefix.len() * width + layers] = true;
    let mut next = f64::INFINITY;
    for (index, stage) in prefix.iter().enumerate().rev() {
        let (before, after) = open.split_at_mut((index + 1) * width);
        let here = &mut before[index * width..];
        // The first layer that fits moves forward with the end, so boundaries are marked once each.
        let (mut first, mut marked) = (0, 0);
        for end in 1..=layers {
            while stage[end] - stage[first] > time {
                first += 1;
            }
            if after[end] {
                if first > 0 {
                    next = next.min(stage[end] - stage[first - 1]);
                }
                marked = marked.max(first);
                here[marked..end].fill(true);
                marked = marked.max(end);
            }
        }
    }
    if !open[0] {
        return Err(next);
    }
    let mut counts = Vec::with_capacity(prefix.len());
    let mut first = 0;
    for (index, stage) in prefix.iter().enumerate() {
        let after = &open[(index + 1) * width..(index + 2) * width];
        let end = (first + 1..=layers)
            .find(|&end| after[end] && stage[end] - stage[first] <= time)
            .ok_or(next)?;
        counts.push((end - first) as u32);
        first = end;
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prefix(times: &[f64]) -> Vec<f64> {
        let mut sum = 0.0;
        let mut prefix = vec![0.0];
        for time in times {
            sum += time;
            prefix.push(sum);
        }
        prefix
    }

    /// Least bottleneck by dynamic programming over all partitions.
    fn exhaustive(prefix: &[&[f64]]) -> f64 {
        let layers = prefix[0].len() - 1;
        let mut best = vec![f64::INFINITY; layers + 1];
        best[0] = 0.0;
        for stage in prefix {
            let mut next = vec![f64::INFINITY; layers + 1];
            for end in 1..=layers {
                for first in 0..end {
                    next[end] = next[end].min(best[first].max(stage[end] - stage[first]));
                }
            }
            best = next;
        }
        best[layers]
    }

    /// Of the partitions within `time` the first in the order of the counts, by trying all.
    fn fewest_in_front(prefix: &[&[f64]], time: f64) -> Vec<u32> {
        fn extend(prefix: &[&[f64]], time: f64, first: usize, counts: &mut Vec<u32>) -> bool {
            let layers = prefix[0].len() - 1;
            let Some(stage) = prefix.get(counts.len()) else {
                return first == layers;
            };
            for end in first + 1..=layers {
                counts.push((end - first) as u32);
                if stage[end] - stage[first] <= time && extend(prefix, time, end, counts) {
                    return true;
                }
                counts.pop();
            }
            false
        }
        let mut counts = Vec::new();
        assert!(extend(prefix, time, 0, &mut counts));
        counts
    }

    #[test]
    fn equal_layers_are_divided_evenly() {
        let p = prefix(&[1.0; 12]);
        assert_eq!(bottleneck(&[&p, &p, &p, &p]).unwrap(), [3, 3, 3, 3]);
        let p = prefix(&[1.0; 10]);
        assert_eq!(bottleneck(&[&p, &p, &p, &p]).unwrap(), [1, 3, 3, 3]);
        assert_eq!(bottleneck(&[&p[..3], &p[..3], &p[..3]]), None);
    }

    proptest! {
        #[test]
        fn equals_dynamic_programming(
            times in prop::collection::vec((0.0f64..5.0, 0.5f64..4.0), 1..14),
            stages in 1usize..6,
            mixed in any::<bool>(),
        ) {
            let slow = prefix(&times.iter().map(|t| t.0).collect::<Vec<_>>());
            let other = prefix(&times.iter().map(|t| t.0 * t.1).collect::<Vec<_>>());
            let rows: Vec<&[f64]> = (0..stages)
                .map(|s| if mixed && s % 2 == 1 { &other[..] } else { &slow[..] })
                .collect();
            match bottleneck(&rows) {
                None => prop_assert!(stages > times.len()),
                Some(counts) => {
                    prop_assert!(counts.iter().all(|&c| c > 0));
                    prop_assert_eq!(counts.iter().sum::<u32>() as usize, times.len());
                    let best = exhaustive(&rows);
                    prop_assert_eq!(slowest(&rows, &counts), best);
                    prop_assert_eq!(counts, fewest_in_front(&rows, best));
                }
            }
        }
    }
}
