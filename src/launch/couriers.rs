//! Carrying pieces to the nodes that asked for them, over the control links. Each node has a courier of its own, so that one with a slow
//! link holds up nobody else; as nobody asks for many at a time, orders behind pieces wait shortly.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use async_channel::{Sender, unbounded};

use super::overlay::{Children, Spawner};
use crate::net::wire::control::{NodeId, Order, Target};
use crate::net::wire::record::{Codec, Piece};

/// Whoever has pieces.
pub trait Pieces {
    /// The length and the bytes of a piece, as it travels; `None` when it cannot be had any more.
    fn piece(&self, piece: Piece) -> impl Future<Output = Option<(u32, Codec, Vec<u8>)>>;
}

/// See the module.
pub struct Couriers {
    tasks: Spawner,
    children: Rc<Children>,
    /// What each is still to carry.
    bags: RefCell<HashMap<NodeId, Sender<Piece>>>,
}

impl std::fmt::Debug for Couriers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Couriers").finish_non_exhaustive()
    }
}

impl Couriers {
    pub fn new(tasks: Spawner, children: Rc<Children>) -> Couriers {
        Couriers { tasks, children, bags: RefCell::default() }
    }

    /// Sends a piece that `from` has to a node below.
    pub fn send<P: Pieces + 'static>(&self, from: &Rc<P>, to: NodeId, piece: Piece) {
        let mut bags = self.bags.borrow_mut();
        let bag = bags.entry(to).or_insert_with(|| {
            let (bag, pieces) = unbounded::<Piece>();
            let (from, children) = (Rc::clone(from), Rc::clone(&self.children));
            let carry = async move {
                while let Ok(piece) = pieces.recv().await {
                    if let Some((len, codec, body)) = from.piece(piece).await {
                        children.order(Target::Node(to), Order::Piece { piece, len, codec }, body).await;
                    }
                }
            };
            self.tasks.spawn(carry).detach();
            bag
        });
        let _ = bag.try_send(piece);
    }
}
