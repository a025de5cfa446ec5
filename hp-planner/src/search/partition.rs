//! Layers to stages: the contiguous partition whose slowest stage is as fast as possible.

/// Layers per stage, at least one each, such that the greatest stage time is least; `None` if there are more stages than
/// layers.
///
/// `prefix[s][l]` is the time that the first `l` layers take on the devices of stage `s`; it starts with 0 and never falls.
/// Of the partitions with the least bottleneck the one with the fewest layers in front is returned, because the first
/// stages of a pipeline hold the activations of the most micro-batches.
///
/// The least bottleneck is the time of some range of layers on some stage. It is found by bisection between bounds until
/// no such value lies between them. A test takes O(s log l) for equal stages and O(s l) for unequal ones.
pub(super) fn bottleneck(prefix: &[&[f64]]) -> Option<Vec<u32>> {
    let stages = prefix.len();
    let layers = prefix.first()?.len() - 1;
    if stages > layers {
        return None;
    }
    // A partition into nearly equal counts gives the upper end.
    let mut best = even(stages, layers);
    let mut high = slowest(prefix, &best);
    // No bottleneck is below the mean at the speed of the fastest stage for each layer.
    let mut rows = prefix.to_vec();
    rows.dedup_by(|a, b| std::ptr::eq(*a, *b));
    let least = (0..layers).map(|l| {
        let times = rows.iter().map(|row| row[l + 1] - row[l]);
        times.fold(f64::INFINITY, f64::min)
    });
    let mut low = least.sum::<f64>() / stages as f64 * (1.0 - 1e-9);
    while low < high {
        let middle = low + (high - low) / 2.0;
        if middle <= low || middle >= high {
            break;
        }
        if let Some(found) = fill(prefix, middle) {
            high = slowest(prefix, &found);
            best = found;
        } else {
            low = middle;
        }
        if high - low <= 1e-9 * high {
            break;
        }
    }
    // The same rule for the bottleneck found, also where the even partition was best already.
    Some(fill(prefix, high).unwrap_or(best))
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

/// A partition in which no stage takes longer than `time`, with the fewest layers in front, or `None` if there is none.
fn fill(prefix: &[&[f64]], time: f64) -> Option<Vec<u32>> {
    if prefix.iter().all(|row| std::ptr::eq(*row, prefix[0])) {
        from_the_back(prefix, time)
    } else {
        reachable(prefix, time)
    }
}

/// Equal stages: each takes as many layers from the back as fit, which leaves the least for the others.
fn from_the_back(prefix: &[&[f64]], time: f64) -> Option<Vec<u32>> {
    let mut counts = vec![0; prefix.len()];
    let mut end = prefix[0].len() - 1;
    for (index, stage) in prefix.iter().enumerate().rev() {
        // Every stage before this one needs a layer.
        let first = stage.partition_point(|&t| stage[end] - t > time).max(index);
        if first >= end {
            return None;
        }
        counts[index] = (end - first) as u32;
        end = first;
    }
    (end == 0).then_some(counts)
}

/// Unequal stages: taking as much as fits can leave a heavy layer to a slow stage because every stage needs a layer, so all
/// boundaries from which the stages behind can finish are followed.
fn reachable(prefix: &[&[f64]], time: f64) -> Option<Vec<u32>> {
    let layers = prefix[0].len() - 1;
    let width = layers + 1;
    let mut open = vec![false; (prefix.len() + 1) * width];
    open[prefix.len() * width + layers] = true;
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
                marked = marked.max(first);
                here[marked..end].fill(true);
                marked = marked.max(end);
            }
        }
    }
    if !open[0] {
        return None;
    }
    let mut counts = Vec::with_capacity(prefix.len());
    let mut first = 0;
    for (index, stage) in prefix.iter().enumerate() {
        let next = &open[(index + 1) * width..(index + 2) * width];
        let end =
            (first + 1..=layers).find(|&end| next[end] && stage[end] - stage[first] <= time)?;
        counts.push((end - first) as u32);
        first = end;
    }
    Some(counts)
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
                    prop_assert!(slowest(&rows, &counts) <= best * (1.0 + 2e-9) + 1e-12);
                }
            }
        }
    }
}
