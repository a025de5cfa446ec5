//! Rectangles of a tensor that is seen as a matrix, and where they lie in flat buffers.

use std::ops::Range;

/// A rectangle of a tensor.
///
/// The tensor is seen as the matrix whose columns run over the split dimension and all after it, and whose rows run over those before: splitting along a dimension takes
/// whole ranges of columns, whatever the number of dimensions. An unsplit tensor is one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region {
    /// First row.
    pub first_row: usize,
    /// One past the last row.
    pub end_row: usize,
    /// First column.
    pub first_column: usize,
    /// One past the last column.
    pub end_column: usize,
}

impl Region {
    pub(super) fn new(rows: Range<usize>, columns: Range<usize>) -> Self {
        Self {
            first_row: rows.start,
            end_row: rows.end,
            first_column: columns.start,
            end_column: columns.end,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.end_row - self.first_row
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.end_column - self.first_column
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows() * self.columns()
    }

    /// What lies in both; `None` if nothing does.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let both = Self {
            first_row: self.first_row.max(other.first_row),
            end_row: self.end_row.min(other.end_row),
            first_column: self.first_column.max(other.first_column),
            end_column: self.end_column.min(other.end_column),
        };
        (both.first_row < both.end_row && both.first_column < both.end_column).then_some(both)
    }

    /// Pushes what lies here and not in `other`: at most four rectangles.
    fn subtract(&self, other: &Self, rest: &mut Vec<Self>) {
        let Some(both) = self.intersection(other) else {
            rest.push(*self);
            return;
        };
        let mut keep = |part: Self| {
            if part.first_row < part.end_row && part.first_column < part.end_column {
                rest.push(part);
            }
        };
        let middle = Self {
            first_row: both.first_row,
            end_row: both.end_row,
            ..*self
        };
        keep(Self {
            end_row: both.first_row,
            ..*self
        });
        keep(Self {
            end_column: both.first_column,
            ..middle
        });
        keep(Self {
            first_column: both.end_column,
            ..middle
        });
        keep(Self {
            first_row: both.end_row,
            ..*self
        });
    }

    /// Cuts into at most `parts` pieces of nearly equal size, by rows if there are enough of them, else by columns.
    pub(super) fn cut(&self, parts: usize) -> impl Iterator<Item = Self> {
        let whole = *self;
        let by_rows = whole.rows() >= parts;
        let extent = if by_rows {
            whole.rows()
        } else {
            whole.columns()
        };
        let parts = parts.min(extent).max(1);
        (0..parts).map(move |part| {
            let (start, end) = (extent * part / parts, extent * (part + 1) / parts);
            if by_rows {
                Self {
                    first_row: whole.first_row + start,
                    end_row: whole.first_row + end,
                    ..whole
                }
            } else {
                Self {
                    first_column: whole.first_column + start,
                    end_column: whole.first_column + end,
                    ..whole
                }
            }
        })
    }
}

/// `regions` without `hole`.
pub(super) fn without(regions: &[Region], hole: &Region) -> Vec<Region> {
    let mut rest = Vec::with_capacity(regions.len());
    for region in regions {
        region.subtract(hole, &mut rest);
    }
    rest
}

/// A rectangle that lies in a flat buffer, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Placed {
    pub(super) region: Region,
    pub(super) place: Strided,
}

/// Where the rows of a rectangle lie: the first at `offset`, each `stride` elements after the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Strided {
    pub(super) offset: usize,
    pub(super) stride: usize,
}

impl Placed {
    /// Where `part`, which must lie inside, is in the buffer.
    pub(super) fn locate(&self, part: &Region) -> Strided {
        let rows = part.first_row - self.region.first_row;
        let columns = part.first_column - self.region.first_column;
        Strided {
            offset: self.place.offset + rows * self.place.stride + columns,
            stride: self.place.stride,
        }
    }
}

/// Copies `rows` x `columns` elements between two buffers.
pub(super) fn copy(
    from: &[f32],
    source: Strided,
    into: &mut [f32],
    target: Strided,
    rows: usize,
    columns: usize,
) {
    if source.stride == columns && target.stride == columns {
        let len = rows * columns;
        into[target.offset..target.offset + len]
            .copy_from_slice(&from[source.offset..source.offset + len]);
        return;
    }
    for row in 0..rows {
        let (source, target) = (
            source.offset + row * source.stride,
            target.offset + row * target.stride,
        );
        into[target..target + columns].copy_from_slice(&from[source..source + columns]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(region: &Region) -> Vec<(usize, usize)> {
        (region.first_row..region.end_row)
            .flat_map(|row| (region.first_column..region.end_column).map(move |c| (row, c)))
            .collect()
    }

    #[test]
    fn difference_and_intersection_partition_a_region() {
        let all: Vec<Region> = (0..3)
            .flat_map(|a| (a + 1..4).flat_map(move |b| (0..3).map(move |c| (a, b, c))))
            .flat_map(|(a, b, c)| (c + 1..4).map(move |d| Region::new(a..b, c..d)))
            .collect();
        for one in &all {
            for other in &all {
                let mut found: Vec<_> = without(&[*one], other).iter().flat_map(cells).collect();
                if let Some(both) = one.intersection(other) {
                    found.extend(cells(&both));
                }
                found.sort_unstable();
                assert_eq!(found, cells(one), "{one:?} without {other:?}");
            }
        }
    }

    #[test]
    fn cuts_cover_a_region_evenly() {
        for (region, parts) in [
            (Region::new(2..9, 1..4), 3),
            (Region::new(0..1, 5..12), 4),
            (Region::new(0..2, 0..2), 9),
        ] {
            let pieces: Vec<_> = region.cut(parts).collect();
            assert!(pieces.len() <= parts);
            let mut found: Vec<_> = pieces.iter().flat_map(cells).collect();
            found.sort_unstable();
            assert_eq!(found, cells(&region));
            let sizes = pieces.iter().map(Region::elements);
            let across = region.columns().max(region.rows());
            assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= across);
        }
    }
}
