//! Time of collectives: latency plus volume over bandwidth (Hockney's alpha-beta model; ring volumes as in Thakur et al. 2005).

use crate::cluster::Link;

/// The links that a group of ranks communicates over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fabric {
    /// Link inside a node, per GPU.
    pub intra: Link,
    /// Link between nodes, per node.
    pub inter: Link,
    /// Ranks of the group in one node.
    pub ranks_per_node: u32,
    /// Equal groups that share the node's outer link at the same time.
    pub sharing: u32,
}

/// What collectives of a number of ranks take on a [`Fabric`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Ring {
    /// Fraction of the bytes that cross every link; 0 for a single rank.
    share: f64,
    /// Bytes per second.
    bandwidth: f64,
    /// Seconds of one pass around.
    latency: f64,
    /// Seconds of the steps of a ring, one after the other.
    hops: f64,
}

impl Ring {
    /// As [`Fabric::all_gather`].
    pub fn all_gather(&self, bytes: f64) -> f64 {
        if self.share <= 0.0 || bytes <= 0.0 {
            return 0.0;
        }
        self.share * bytes / self.bandwidth + self.latency
    }

    /// Seconds of all-gathers, or reduce-scatters, of `bytes` in `parts` pieces that follow each other: the volume once, and for
    /// each piece every step of the ring.
    pub fn gather_parts(&self, bytes: f64, parts: f64) -> f64 {
        if self.share <= 0.0 || bytes <= 0.0 {
            return 0.0;
        }
        self.share * bytes / self.bandwidth + parts * self.hops
    }
}

impl Fabric {
    /// Fabric of a group whose `ranks` members lie `stride` GPUs apart in nodes of `gpus_per_node`, all GPUs busy alike.
    ///
    /// A group of stride 1 fills nodes; with stride `s` there are at most `gpus_per_node / s` members in a node, and
    /// the other GPUs of the node belong to groups of the same kind that use the outer link at the same time.
    pub fn strided(intra: Link, inter: Link, gpus_per_node: u32, ranks: u32, stride: u32) -> Self {
        let ranks_per_node = (gpus_per_node / stride.max(1)).clamp(1, ranks.max(1));
        Self {
            intra,
            inter,
            ranks_per_node,
            sharing: (gpus_per_node / ranks_per_node).max(1),
        }
    }

    /// Nodes that a group of `ranks` spans.
    fn nodes(&self, ranks: u32) -> u32 {
        ranks.div_ceil(self.ranks_per_node.max(1))
    }

    /// Bytes per second that a ring over `ranks` sustains: the slowest of its links.
    fn bandwidth(&self, ranks: u32) -> f64 {
        let intra = self.intra.bandwidth_gb_s * 1e9;
        if self.nodes(ranks) == 1 {
            return intra;
        }
        let inter = self.inter.bandwidth_gb_s * 1e9 / f64::from(self.sharing);
        if self.ranks_per_node == 1 {
            inter
        } else {
            intra.min(inter)
        }
    }

    /// Seconds of latency for one pass around: rings inside nodes, trees between them.
    fn latency(&self, ranks: u32) -> f64 {
        let nodes = self.nodes(ranks);
        let inside = f64::from(self.ranks_per_node.min(ranks)) - 1.0;
        inside * self.intra.latency_us * 1e-6
            + f64::from(nodes).log2().ceil() * self.inter.latency_us * 1e-6
    }

    /// Seconds of an all-reduce of `bytes` over `ranks`: `2 (p - 1) / p` of the bytes cross every link.
    pub fn all_reduce(&self, bytes: f64, ranks: u32) -> f64 {
        2.0 * self.all_gather(bytes, ranks)
    }

    /// Seconds of an all-gather to, or a reduce-scatter from, `bytes` per rank: `(p - 1) / p` of them cross every link.
    pub fn all_gather(&self, bytes: f64, ranks: u32) -> f64 {
        self.ring(ranks).all_gather(bytes)
    }

    /// The ring over `ranks`, for several collectives over the same ranks.
    pub fn ring(&self, ranks: u32) -> Ring {
        if ranks <= 1 {
            return Ring::default();
        }
        let p = f64::from(ranks);
        Ring {
            share: (p - 1.0) / p,
            bandwidth: self.bandwidth(ranks),
            latency: self.latency(ranks),
            hops: self.hops(ranks),
        }
    }

    /// Seconds of latency of all `p - 1` steps of a ring, each as slow as its slowest link; all-gather and reduce-scatter have no
    /// trees.
    fn hops(&self, ranks: u32) -> f64 {
        let step = if self.nodes(ranks) > 1 {
            self.inter.latency_us / f64::from(self.ranks_per_node.max(1))
                + self.intra.latency_us * (1.0 - 1.0 / f64::from(self.ranks_per_node.max(1)))
        } else {
            self.intra.latency_us
        };
        (f64::from(ranks) - 1.0) * step * 1e-6
    }

    /// Seconds of an all-to-all in which each rank holds `bytes`: what leaves a node shares its outer link.
    pub fn all_to_all(&self, bytes: f64, ranks: u32) -> f64 {
        if ranks <= 1 || bytes <= 0.0 {
            return 0.0;
        }
        let p = f64::from(ranks);
        let inside = f64::from(self.ranks_per_node.min(ranks));
        let within = bytes * (inside - 1.0) / p / (self.intra.bandwidth_gb_s * 1e9);
        let gpus = inside * f64::from(self.sharing);
        let outside = bytes * (p - inside) / p * gpus / (self.inter.bandwidth_gb_s * 1e9);
        within.max(outside) + self.latency(ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTRA: Link = Link::new(300.0, 4.0);
    const INTER: Link = Link::new(100.0, 10.0);

    fn close(left: f64, right: f64) {
        assert!((left / right - 1.0).abs() < 1e-12, "{left} {right}");
    }

    #[test]
    fn all_reduce_inside_a_node() {
        let fabric = Fabric::strided(INTRA, INTER, 8, 8, 1);
        // 2 * 7/8 * 1e9 / 300e9 + 2 * 7 * 4e-6
        close(fabric.all_reduce(1e9, 8), 2.0 * 0.875e9 / 300e9 + 56e-6);
        assert!(fabric.all_reduce(1e9, 1) == 0.0);
    }

    #[test]
    fn all_reduce_between_nodes_is_bound_by_the_outer_link() {
        let fabric = Fabric::strided(INTRA, INTER, 8, 32, 1);
        // 4 nodes: 2 * 31/32 * 1e9 / 100e9 + 2 * (7 * 4e-6 + 2 * 10e-6)
        close(
            fabric.all_reduce(1e9, 32),
            2.0 * 31.0 / 32.0 * 1e9 / 100e9 + 96e-6,
        );
    }

    #[test]
    fn groups_of_one_rank_per_node_share_the_outer_link() {
        let fabric = Fabric::strided(INTRA, INTER, 8, 4, 8);
        assert_eq!((fabric.ranks_per_node, fabric.sharing), (1, 8));
        close(
            fabric.all_reduce(1e9, 4),
            2.0 * 0.75e9 / 12.5e9 + 2.0 * 20e-6,
        );
    }

    #[test]
    fn pieces_pay_every_step_of_the_ring() {
        let fabric = Fabric::strided(INTRA, INTER, 8, 16, 1);
        // 15 steps, each 7/8 of an inner and 1/8 of an outer latency: 4.75 us; 15/16 of the bytes at the outer link's 100 GB/s.
        close(
            fabric.ring(16).gather_parts(1e9, 24.0),
            0.9375e9 / 100e9 + 24.0 * 15.0 * 4.75e-6,
        );
    }

    #[test]
    fn all_to_all_is_bound_by_what_leaves_the_node() {
        let fabric = Fabric::strided(INTRA, INTER, 8, 16, 1);
        // Half of each of 8 GPUs' bytes leaves: 8 * 0.5e6 / 100e9, latency 7 * 4e-6 + 10e-6.
        close(fabric.all_to_all(1e6, 16), 4e6 / 100e9 + 38e-6);
    }
}
