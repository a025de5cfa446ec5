//! The messages of a plan, and the order in which each rank sends and receives them.
//!
//! A message is at most [`MESSAGE`] elements, of one or many regions. Messages are put into rounds, in each of which a rank sends at most one and receives at most one. A rank goes through its rounds in
//! order, sends before it receives, and waits with a message until its receiver has taken the one [`WINDOW`] before. So at most [`WINDOW`] messages per pair are
//! on their way, and nobody waits for ever: every wait is for something of an earlier round, or for a message of the same
//! round that its sender hands out before it waits for anything of that round.

use super::plan::{Move, ReshardPlan};
use super::region::Strided;
use super::state::buffers_of;

/// Elements of a message: 256 KiB, which stays in a core's second-level cache from its packing to its unpacking.
pub(super) const MESSAGE: usize = 64 * 1024;

/// Messages that a pair of ranks may have on their way.
pub(super) const WINDOW: usize = 4;

/// Some rows of a region in one buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// Position of the buffer among those of a rank.
    pub(super) buffer: usize,
    pub(super) source: Strided,
    pub(super) target: Strided,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// What goes in one message.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) parts: Vec<Part>,
    pub(super) elements: usize,
}

/// One turn of a rank.
#[derive(Debug)]
pub(super) enum Turn {
    /// Sends to the rank; the number counts the messages of the pair.
    Send(usize, usize, Message),
    /// Receives from the rank.
    Receive(usize, Message),
}

/// What `rank` sends and receives, in order.
pub(super) fn turns(plan: &ReshardPlan, rank: usize) -> Vec<Turn> {
    let world = plan.world_size();
    let mut pairs: Vec<&[Move]> = plan
        .moves()
        .chunk_by(|a, b| (a.from, a.to) == (b.from, b.to))
        .collect();
    // Neighbours first, all around, so that no rank is everybody's first receiver.
    pairs.sort_by_key(|pair| ((pair[0].to + world - pair[0].from) % world, pair[0].from));
    let (mut next_out, mut next_in) = (vec![0_usize; world], vec![0_usize; world]);
    let mut turns = Vec::new();
    for pair in pairs {
        let (from, to) = (pair[0].from, pair[0].to);
        for (number, message) in messages(plan, pair).into_iter().enumerate() {
            let round = next_out[from].max(next_in[to]);
            next_out[from] = round + 1;
            next_in[to] = round + 1;
            if from == rank {
                turns.push(((round, 0), Turn::Send(to, number, message)));
            } else if to == rank {
                turns.push(((round, 1), Turn::Receive(from, message)));
            }
        }
    }
    turns.sort_by_key(|(order, _)| *order);
    turns.into_iter().map(|(_, turn)| turn).collect()
}

/// Packs the moves of one pair.
fn messages(plan: &ReshardPlan, moves: &[Move]) -> Vec<Message> {
    let moments = plan.from().model().moments().len();
    let mut messages = vec![Message::default()];
    for movement in moves {
        for buffer in buffers_of(movement.component, moments) {
            let whole = Part {
                buffer,
                source: movement.source,
                target: movement.target,
                rows: movement.region.rows(),
                columns: movement.region.columns(),
            };
            pack(whole, &mut messages);
        }
    }
    messages
}

/// Puts a part at the end, cut where a message is full.
fn pack(mut rest: Part, messages: &mut Vec<Message>) {
    while rest.rows > 0 {
        if messages.last().is_none_or(|last| last.elements == MESSAGE) {
            messages.push(Message::default());
        }
        let Some(message) = messages.last_mut() else {
            return;
        };
        let room = MESSAGE - message.elements;
        let (rows, columns) = if rest.columns <= room {
            ((room / rest.columns).min(rest.rows), rest.columns)
        } else {
            (1, room)
        };
        message.parts.push(Part {
            rows,
            columns,
            ..rest
        });
        message.elements += rows * columns;
        if columns == rest.columns {
            rest = rest.below(rows);
        } else {
            // The rest of this row, then the rows below.
            let row = Part {
                rows: 1,
                ..rest.right_of(columns)
            };
            pack(row, messages);
            rest = rest.below(1);
        }
    }
}

impl Part {
    fn below(self, rows: usize) -> Self {
        let down = |at: Strided| Strided {
            offset: at.offset + rows * at.stride,
            ..at
        };
        Self {
            source: down(self.source),
            target: down(self.target),
            rows: self.rows - rows,
            ..self
        }
    }

    fn right_of(self, columns: usize) -> Self {
        let right = |at: Strided| Strided {
            offset: at.offset + columns,
            ..at
        };
        Self {
            source: right(self.source),
            target: right(self.target),
            columns: self.columns - columns,
            ..self
        }
    }
}
