//! Processes that Open MPI 5 has made jobs of one of, where they should be the ranks of one job. What a program is linked with is known before
//! it starts ([`Mpi`]), but not what a script starts or Python loads: that shows in what its processes have mapped.

use std::collections::HashSet;
use std::fs;
use std::rc::Rc;
use std::time::{Duration, Instant};

use smol::Timer;

use super::job::Job;
use crate::launch::mpi::Mpi;
use crate::launch::pmi;
use crate::sys::process;

/// The first look after the ranks were started, and for each of them; every next one is later by [`LATER`].
const FIRST: Duration = Duration::from_millis(50);
const EACH: Duration = Duration::from_millis(1);
const LATER: f64 = 1.2;
/// Looking may take one part in so many of a processor's time.
const COST: u32 = 50;
/// A job that does something else for so long between two looks is left alone.
const LAST: Duration = Duration::from_secs(60);

/// Ends the job when there is one. Never returns.
pub(super) async fn watch(job: &Rc<Job>) {
    let [mark, _] = pmi::client_variables(&job.node.session, job.launch.job);
    let mut pause = FIRST + EACH * job.place.count;
    while pause < LAST {
        Timer::after(pause).await;
        let (begun, mark) = (Instant::now(), mark.clone());
        if smol::unblock(move || is_there(mark.as_bytes())).await {
            let error = Mpi::singletons(job.launch.size).at(job.node.host.clone());
            job.failed(&error).await;
            break;
        }
        pause = pause.mul_f64(LATER).max(begun.elapsed() * COST);
    }
    std::future::pending::<()>().await;
}

/// Whether a process of the job that `mark`, a variable of its environment, belongs to is one.
fn is_there(mark: &[u8]) -> bool {
    let (mut left, mut seen) = (process::children(), HashSet::new());
    while let Some(pid) = left.pop() {
        if seen.insert(pid) {
            left.extend(process::children_of(pid));
            if fs::read(format!("/proc/{pid}/maps")).is_ok_and(|maps| Mpi::is_mapped_5(&maps))
                && fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environment| is_alone(&environment, mark))
            {
                return true;
            }
        }
    }
    false
}

/// Its own launcher would have told it where its server is.
fn is_alone(environment: &[u8], mark: &[u8]) -> bool {
    let has = |is: &dyn Fn(&[u8]) -> bool| environment.split(|byte| *byte == 0).any(is);
    has(&|variable| variable == mark) && !has(&|variable| variable.starts_with(b"PMIX_RANK="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_server_or_another_job_is_not_alone() {
        assert!(is_alone(b"A=1\0FLUX_JOB_ID=7\0", b"FLUX_JOB_ID=7"));
        assert!(!is_alone(b"A=1\0FLUX_JOB_ID=77\0", b"FLUX_JOB_ID=7"));
        assert!(!is_alone(b"FLUX_JOB_ID=7\0PMIX_RANK=0\0", b"FLUX_JOB_ID=7"));
    }
}
