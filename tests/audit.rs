//! Programs on hosts without user namespaces: their libraries come from the store through their dynamic linkers, the output is that of a
//! plain run, and what cannot be shown so is refused or run plainly, with the reason.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "common/site.rs"]
mod site;

use std::fs;

use cluster::Cluster;
use site::{HOSTS, RANKS, Site, build, tool};

const AUDIT: [&str; 2] = ["--view", "audit"];

/// One test: the cluster is made once.
#[test]
fn audited_programs() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED audited programs: {obstacle}");
    }
    if !["gcc", "g++"].into_iter().all(tool) {
        return;
    }
    let site = Site::up("audit");
    build(&site);
    for uid in [65534] {
        linked(&site, uid);
    }
    assert_eq!(site.cluster.leftovers().unwrap().len(), 0, "{:?}", site.cluster.leftovers().unwrap());
}

fn linked(site: &Site, uid: u32) {
    for program in ["rpath", "runpath", "origin", "tls", "catcher", "dynamic"] {
        site.same(uid, &AUDIT, &[], &[&format!("/shared/app/bin/{program}"), "an argument"]);
        for host in site.cluster.host_ops().unwrap() {
            eprintln!("{program} {} {:?}", host.host, host.ops);
        }
    }
}
