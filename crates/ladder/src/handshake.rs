//! From a link to a connection that is to be proven (`prove`): versions, facts and offers.
//!
//! Both sides send their hello at once and then read the other's, so neither waits for the other to
//! begin. What is opened follows purely from both offers, so both sides come to the same answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use canary::Facts;
use link::{Link, LinkError};
use rung::{Fault, Handle, Offer, Reason, RungId, Trust};
use worker::Process;

use crate::channel::Options;
use crate::core::Core;
use crate::error::{ConnectError, Ended};
use crate::facts;
use crate::fail::reached;
use crate::ladder::Ladder;
use crate::wire::{self, Hello, Message, Role, VERSION};

/// Lowest and highest version that this build speaks.
const SPOKEN: [u32; 2] = [VERSION, VERSION];

/// What a host may ask a worker to wait, at most.
const LONGEST: Duration = Duration::from_secs(3600);

/// How long a dead worker may take to be seen dead, for a better error.
const POST_MORTEM: Duration = Duration::from_secs(1);

/// What a process did, after its link has ended.
pub(crate) fn post_mortem(process: Option<&Arc<Process>>) -> Option<worker::Exit> {
    process.and_then(|process| process.wait(POST_MORTEM))
}

/// Exchanges hellos over a link and opens the rungs that both sides offer; nothing is proven then.
pub(crate) fn greet(
    link: Link,
    role: Role,
    ladder: &Ladder,
    trust: &Trust,
    options: Options,
    process: Option<Arc<Process>>,
) -> Result<Arc<Core>, ConnectError> {
    let limit = options.handshake;
    let deadline = Instant::now().checked_add(limit);
    let failed = |error: LinkError| match error {
        LinkError::Deadline => ConnectError::Deadline(limit),
        other => ConnectError::Ended(other.into(), post_mortem(process.as_ref())),
    };
    let broken = |fault| ConnectError::Ended(Ended::Broken(fault), post_mortem(process.as_ref()));

    let offers = ladder.probe();
    let mine = facts::gather(ladder);
    let waits = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    let (json, handles) = hello(role, &offers, mine.clone(), waits).map_err(broken)?;
    match link.send(&json, &handles, deadline) {
        // A peer that is gone already may have said why: that is still to be read.
        Ok(()) | Err(LinkError::Closed) => reached("hello-sent"),
        Err(error) => return Err(failed(error)),
    }

    let frame = link.receive(deadline).map_err(failed)?;
    reached("hello-received");
    let mut handles = frame.handles;
    let (message, _) = wire::decode(&frame.json).map_err(broken)?;
    let Message::Hello(theirs) = message else {
        return Err(broken(Fault::new(Reason::BadMetadata, "its first message is no hello")));
    };
    if theirs.role == role {
        // Our own words come back from something that echoes its input.
        return Err(broken(Fault::new(Reason::BadMetadata, "the peer has our own role")));
    }
    let [lowest, highest] = theirs.protocol;
    if lowest > SPOKEN[1] || highest < SPOKEN[0] {
        return Err(ConnectError::Version { mine: SPOKEN, theirs: theirs.protocol });
    }
    let their_offers = theirs
        .offers
        .into_iter()
        .map(|wire| Offer::join(wire, &mut handles))
        .collect::<Result<Vec<_>, _>>()
        .map_err(broken)?;
    if !handles.is_empty() {
        let detail = format!("{} descriptors that no offer declares", handles.len());
        return Err(broken(Fault::new(Reason::WrongHandles, detail)));
    }
    let differences: Vec<String> =
        mine.differences(&theirs.facts).iter().map(ToString::to_string).collect();
    if !differences.is_empty() {
        tracing::warn!(
            "the peer differs, and whatever the canaries prove holds: {}",
            differences.join("; ")
        );
    }
    let sessions = ladder.open(&offers, &their_offers, &theirs.lacks, trust);
    // A worker has as much patience as its host, who has been told how much there is to prove.
    let waits = Duration::from_millis(theirs.waits).min(LONGEST);
    let handshake = if role == Role::Worker { limit.max(waits) } else { limit };
    let options = Options { handshake, ..options };
    Ok(Core::new(link, role, sessions, [mine, theirs.facts], options, process))
}

type Probed = [(RungId, Result<Offer, rung::Refusal>)];

fn hello(
    role: Role,
    offers: &Probed,
    facts: Facts,
    waits: u64,
) -> Result<(String, Vec<Handle>), Fault> {
    let (mut wires, mut handles) = (Vec::new(), Vec::new());
    for offer in offers.iter().filter_map(|(_, offer)| offer.as_ref().ok()) {
        // The offer itself is still needed to open, so its handles go as duplicates.
        let copies: Result<Vec<Handle>, _> =
            offer.handles.iter().map(|handle| handle.try_clone()).collect();
        let copies =
            copies.map_err(|error| Fault::new(Reason::NoDescriptors, error.to_string()))?;
        let copy = Offer { rung: offer.rung.clone(), meta: offer.meta.clone(), handles: copies };
        let (wire, some) = copy.split()?;
        wires.push(wire);
        handles.extend(some);
    }
    let lacks = offers.iter().filter_map(|(rung, offer)| {
        let refusal = offer.as_ref().err()?;
        let detail = refusal.for_peer().detail().chars().take(200).collect();
        Some((rung.clone(), refusal.reason().code().to_owned(), detail))
    });
    let (offers, lacks) = (wires, lacks.collect());
    let message = Message::Hello(Hello { role, protocol: SPOKEN, facts, offers, lacks, waits });
    Ok((wire::encode(&message, &wire::Riders::default())?, handles))
}
