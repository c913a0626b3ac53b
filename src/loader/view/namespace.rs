//! The keeper's side: namespaces and mounts. For a fresh, single-threaded process (the kernel lets no other join a user namespace).
//!
//! A session has one *base* per node: a user namespace (for ordinary users; one for all ranks, so that they can read each other's memory) and
//! a mount namespace that holds the store. Each *view*, a set of directories to show, has a copy of that mount namespace with its mounts in it,
//! and each job runs in a copy of its view's: so jobs with the same roots share one FUSE file system and what the kernel remembers of it, and
//! jobs with others see nothing of it. Only descriptors (the keeper's of the base, the agent's of the views) and the processes inside keep
//! namespaces alive, so nothing can be left behind.
//!
//! Only mounts attached in one's own mount namespace can be bound from (a detached one only since Linux 6.15), and every existing
//! directory shows something. So a helper mount is stacked on a directory and covered again by what that directory showed;
//! below the cover it stays attached and is reached through a descriptor. The store is covered on `/dev` (mount points of its own, so that
//! no rename there crosses the cover), the top of a view by its own first root. A copied namespace has copied mounts, which no
//! descriptor of the old one leads to: only the working directory moves along, so the store is carried over as that.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

use super::directory::{self, Directory};
use crate::error::{Context, Error};
use crate::loader::catalog::{as_path, is_below};
use crate::loader::store;
use crate::net::wire::record::FileId;
use crate::sys::node;
use crate::sys::without::{Ability, Without};

/// Where helper mounts are covered.
const COVERED: &str = "/dev";
/// Hidden for the moment that this takes.
const ASIDE: &str = "/proc";
/// A RAM disk of less holds few programs: a disk is better, if there is room on one.
pub const SMALL: u64 = 256 << 20;

/// What a node does not allow; decides the fallback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lacks {
    /// No own namespaces, hence no view by mounts at all.
    Namespaces,
    /// Namespaces, but no FUSE in them: files can still be bound directly onto the originals.
    Fuse,
}

/// Why a step failed, and whether the node lacks something that a fallback does without.
#[derive(Debug)]
pub struct Failure {
    pub lacks: Option<Lacks>,
    pub error: Error,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure { lacks: None, error }
    }
}

impl Failure {
    /// FUSE is not to be used.
    pub fn no_fuse() -> Self {
        no_fuse(Errno::PERM)
    }
}

type Result<T, E = Failure> = std::result::Result<T, E>;

/// Where the staged files lie.
#[derive(Debug, Clone, Copy)]
pub enum Place<'a> {
    /// A RAM disk of at most this many bytes, which only this session's processes can see; on a disk where that cannot be or is [`SMALL`].
    Memory(u64),
    /// An existing directory.
    Directory(&'a Path),
}

/// What all jobs of a session on a node share. The agent holds the descriptors and gives copies to later keepers.
#[derive(Debug)]
pub struct Base {
    /// `None` when made by root.
    pub user: Option<OwnedFd>,
    pub mount: OwnedFd,
    /// The store's directory, for [`store::Store`]; usable in any mount namespace.
    pub store: OwnedFd,
    /// The same, read-only, as a mount of the base's namespace: what files are bound from.
    pub sealed: OwnedFd,
    /// Where the store is in a directory of the user's.
    pub directory: Option<Directory>,
    /// Why it is there, if that was not asked for.
    pub spilled: Option<String>,
}

impl Base {
    /// Makes the namespaces and the store; the process is inside afterwards, with `/` as its working directory.
    pub fn create(place: Place<'_>, without: &Without) -> Result<Base> {
        // Before anything is changed: ranks run in this process's place where that cannot be.
        let (bytes, asked) = match place {
            Place::Memory(bytes) => (bytes, None),
            Place::Directory(path) => (0, Some(Directory::create(path)?)),
        };
        let root = enter().inspect_err(|_| asked.iter().for_each(Directory::remove))?;
        let made = asked.map_or_else(|| mount_memory(bytes, without), |directory| Ok((Some(directory), None)));
        let mounted = made.and_then(|(directory, spilled)| {
            let mounted = mount_store(directory.as_ref());
            let (store, sealed) = mounted.inspect_err(|_| directory.iter().for_each(Directory::remove))?;
            Ok((directory, spilled, store, sealed))
        });
        // Who goes on without needs its own /proc.
        let (directory, spilled, store, sealed) =
            mounted.inspect_err(|_| _ = rustix::mount::unmount(ASIDE, UnmountFlags::DETACH))?;
        if !root && let Err(error) = super::ssh::own_configuration(store.as_fd(), &sealed) {
            log::warn!("{error}: ssh may refuse its configuration in ranks");
        }
        let user = if root { None } else { Some(open_namespace("user")?) };
        let mount = open_namespace("mnt")?;
        rustix::process::chdir("/").op_on("enter", "/")?;
        Ok(Base { user, mount, store, sealed, directory, spilled })
    }

    /// At the end of the session: removes what it has in a directory of the user's; a RAM disk goes by itself.
    pub fn remove_store(&self) {
        if let Some(directory) = &self.directory {
            // The cover lies on it, and what is mounted on cannot be removed.
            let _ = rustix::mount::unmount(COVERED, UnmountFlags::DETACH);
            directory.remove();
        }
    }

    /// Enters a base that an earlier keeper made; the working directory becomes `/`.
    pub fn join(&self) -> Result<()> {
        if let Some(user) = &self.user {
            setns(user, CloneFlags::CLONE_NEWUSER).op("join the session's user namespace")?;
        }
        Ok(setns(&self.mount, CloneFlags::CLONE_NEWNS).op("join the session's mount namespace")?)
    }
}

/// Enters new namespaces, with [`COVERED`] once more at [`ASIDE`]; whether this is root.
fn enter() -> Result<bool> {
    let root = rustix::process::geteuid().is_root() && unshare(CloneFlags::CLONE_NEWNS).is_ok();
    if !root {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)
            .map_err(|e| forbidden("make a user namespace", e))?;
        // Without this order and this word the kernel refuses a group map to ordinary users.
        let maps = [
            ("setgroups", "deny".into()),
            ("uid_map", format!("{uid} {uid} 1")),
            ("gid_map", format!("{gid} {gid} 1")),
        ];
        for (file, line) in maps {
            std::fs::write(format!("/proc/self/{file}"), line)
                .map_err(|e| forbidden("map the user into his namespace", e))?;
        }
    }
    // Slave, not private: what the host's automounter mounts later has to appear here.
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)
        .map_err(|e| forbidden("change mounts", e))?;
    // Before the stacking: a recursive bind would copy what is stacked, too. It waits on any other directory until it is moved on top.
    rustix::mount::mount_bind_recursive(COVERED, ASIDE).map_err(|e| forbidden("bind a directory", e))?;
    Ok(root)
}

fn forbidden(operation: &'static str, cause: impl std::fmt::Display) -> Failure {
    let error = Error::new(operation, cause)
        .remedy("use --view audit, or let the administrator allow unprivileged user namespaces");
    Failure { lacks: Some(Lacks::Namespaces), error }
}

/// Mounts a RAM disk for the store where it will be covered; where that cannot be or is small, gives a directory on a disk, and why.
fn mount_memory(bytes: u64, without: &Without) -> Result<(Option<Directory>, Option<String>)> {
    let spill = |why: String, path: PathBuf| {
        let why = format!("{why}; its store is in {}", path.display());
        Ok((Some(Directory::create(&path)?), Some(why)))
    };
    let (bytes, small) = match without.denies(Ability::Ram) {
        None => (bytes, format!("its memory has room for {} MiB of files", bytes >> 20)),
        Some(cause) => (bytes.min(1 << 20), format!("no RAM disk ({cause})")),
    };
    if bytes < SMALL
        && let Some(path) = directory::on_disk(SMALL)
    {
        return spill(small, path);
    }
    let options = CString::new(format!("size={bytes},mode=0700")).expect("no NUL in a number");
    // Not noexec: programs and libraries are what it is for.
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if without.has(Ability::Exec) {
        flags |= MountFlags::NOEXEC;
    }
    rustix::mount::mount("hpcrt-store", COVERED, "tmpfs", flags, &*options)
        .map_err(|e| forbidden("mount the store's RAM disk", e))?;
    let Err(cause) = node::maps_programs(COVERED) else { return Ok((None, None)) };
    rustix::mount::unmount(COVERED, UnmountFlags::DETACH).op("unmount the store's RAM disk")?;
    let cause = format!("programs cannot be executed from a RAM disk ({cause})");
    match directory::on_disk(SMALL) {
        Some(path) => spill(cause, path),
        None => Err(Error::new("find a place for the program's files", cause)
            .remedy("name a directory with --store DIR that is not mounted noexec")
            .into()),
    }
}

/// The store's directory, writable and (as a path descriptor) read-only. `directory`: where it is, if not on the RAM disk.
fn mount_store(directory: Option<&Directory>) -> Result<(OwnedFd, OwnedFd)> {
    let store = match directory {
        Some(directory) => {
            rustix::mount::mount_bind(&directory.path, COVERED).op_on("bind the store", &directory.path)?;
            directory.own.try_clone().op("keep the store open")?
        }
        None => {
            let store = open_directory(COVERED, OFlags::RDONLY)?;
            rustix::mount::mount_bind(COVERED, COVERED).op("bind the store")?;
            store
        }
    };
    // Flags that the mount inherited may be locked: a remount must repeat them.
    let flags = rustix::fs::statvfs(COVERED).op("inspect the store")?.f_flag;
    let mut keep = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    if flags.contains(StatVfsMountFlags::NOEXEC) {
        keep |= MountFlags::NOEXEC;
    }
    for (bit, flag) in
        [(1 << 10, MountFlags::NOATIME), (1 << 11, MountFlags::NODIRATIME), (1 << 12, MountFlags::RELATIME)]
    {
        if flags.bits() & bit != 0 {
            keep |= flag;
        }
    }
    rustix::mount::mount_remount(COVERED, keep, "").op("make the store read-only for programs")?;
    let sealed = open_directory(COVERED, OFlags::PATH)?;
    rustix::mount::mount_move(ASIDE, COVERED).op_on("cover the store with", COVERED)?;
    Ok((store, sealed))
}

fn open_directory(path: impl AsRef<Path>, how: OFlags) -> Result<OwnedFd, Error> {
    let flags = how | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path.as_ref(), flags, Mode::empty()).op_on("open", path)
}

/// The namespace that this process is in.
fn open_namespace(kind: &str) -> Result<OwnedFd, Error> {
    let path = format!("/proc/self/ns/{kind}");
    rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).op_on("open", path)
}

/// A path to `name` in a directory known by descriptor.
pub(super) fn of(directory: &impl AsFd, name: &str) -> String {
    format!("/proc/self/fd/{}/{name}", directory.as_fd().as_raw_fd())
}

/// What [`Mounts::join`] needs: the view's namespace, and in it the store and the top of the skeleton. The view exists as long as anybody has
/// these open.
pub type Shared = [OwnedFd; 3];

/// The mount namespace of a view, and the process in it. Processes that are started now see the view and whatever is still added to it,
/// those started after [`Mounts::leave`] a copy of what it is then.
#[derive(Debug)]
pub struct Mounts {
    /// [`Base::sealed`] in this namespace.
    sealed: OwnedFd,
    roots: Vec<Vec<u8>>,
    top: Option<OwnedFd>,
}

impl Mounts {
    /// Copies the base's mount namespace, in which the process is; everything in the copy shows the originals still. To be called once.
    /// `sealed`: [`Base::sealed`]. `roots`: the same, in the same order, as the skeleton's. The working directory becomes `/`.
    pub fn create(sealed: BorrowedFd<'_>, roots: Vec<Vec<u8>>) -> Result<Mounts> {
        if let Some(inner) = roots.iter().find(|r| roots.iter().any(|outer| is_below(r, outer))) {
            return Err(Error::new("show", "it lies inside another root of the view").on(as_path(inner)).into());
        }
        rustix::process::fchdir(sealed).op("enter the store")?;
        unshare(CloneFlags::CLONE_NEWNS).map_err(|e| forbidden("make the view's mount namespace", e))?;
        let sealed = open_directory(".", OFlags::PATH)?;
        rustix::process::chdir("/").op_on("enter", "/")?;
        Ok(Mounts { sealed, roots, top: None })
    }

    /// Enters the namespace of a view with these roots that another process made. The working directory becomes `/`.
    pub fn join([namespace, sealed, top]: Shared, roots: Vec<Vec<u8>>) -> Result<Mounts> {
        setns(&namespace, CloneFlags::CLONE_NEWNS).op("join the view's mount namespace")?;
        Ok(Mounts { sealed, roots, top: Some(top) })
    }

    /// Copies the namespace once more: from now on no mount here or there concerns the other.
    pub fn leave(self) -> Result<()> {
        Ok(unshare(CloneFlags::CLONE_NEWNS).op("make the job's mount namespace")?)
    }

    /// Mounts the view's file system. The descriptor is for [`super::Skeleton::serve`] in another process; until that returns nothing
    /// below the first root can be reached. To be closed here once passed on: as long as anybody has it open, requests wait for an
    /// agent, even a dead one. When this fails, [`Mounts::bind_files`] still works, directly onto the originals.
    pub fn mount_fuse(&mut self) -> Result<(OwnedFd, Shared)> {
        let first = self.roots.first().ok_or_else(|| Error::new("show the program's directories", "there are none"))?;
        // The device belongs to the user namespace it was opened in, and the mount has to agree: only a keeper can open it.
        let fuse = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(no_fuse)?;
        let options = CString::new(mount_options(fuse.as_fd())).expect("no NUL in numbers");
        rustix::mount::mount("hpcrt", &**first, "fuse.hpcrt", MountFlags::NOSUID | MountFlags::NODEV, &*options)
            .map_err(|e| match e {
                Errno::PERM | Errno::NODEV | Errno::ACCESS => no_fuse(e),
                e => not_mounted(first, e),
            })?;
        let top = open_directory(as_path(first), OFlags::PATH)?;
        let copy = |fd: &OwnedFd| fd.try_clone().op("share the view");
        let shared = [open_namespace("mnt")?, copy(&self.sealed)?, copy(&top)?];
        self.top = Some(top);
        Ok((fuse, shared))
    }

    /// Puts the view over the original directories, once it is served. Without FUSE there is nothing to do.
    pub fn bind_roots(&self) -> Result<()> {
        let Some(top) = &self.top else { return Ok(()) };
        for (index, root) in self.roots.iter().enumerate() {
            rustix::mount::mount_bind(of(top, &index.to_string()), &**root).map_err(|e| not_mounted(root, e))?;
        }
        Ok(())
    }

    /// Binds staged files onto their original paths, read-only, so that their pages come straight from the store. They must be complete.
    /// Returns how many were bound: what cannot be (the kernel's `fs.mount-max`, a name gone meanwhile) is read through the view.
    pub fn bind_files<'a>(&self, files: impl IntoIterator<Item = (&'a [u8], FileId)>) -> usize {
        let mut bound = 0;
        for (path, id) in files {
            match rustix::mount::mount_bind(of(&self.sealed, &store::name(id)), path) {
                Ok(()) => bound += 1,
                Err(Errno::NOSPC) => {
                    log::warn!(
                        "this kernel allows no more mounts (fs.mount-max): further files are read through the view"
                    );
                    break;
                }
                Err(e) => log::warn!("staged file {id} is not bound to {:?}: {e}", as_path(path)),
            }
        }
        bound
    }
}

/// `user_id` and `group_id` must be mapped in the mounting user namespace. `allow_other`: within that namespace, ranks need not have
/// the mounter's exact credentials. `default_permissions`: the kernel checks modes, so that cached names need no request.
fn mount_options(fuse: BorrowedFd<'_>) -> String {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    format!("fd={},rootmode=40755,user_id={uid},group_id={gid},default_permissions,allow_other", fuse.as_raw_fd())
}

fn no_fuse(cause: Errno) -> Failure {
    let error = Error::new("use FUSE on this node", cause)
        .on("/dev/fuse")
        .remedy("let the administrator load fuse and make /dev/fuse accessible");
    Failure { lacks: Some(Lacks::Fuse), error }
}

fn not_mounted(path: &[u8], cause: Errno) -> Failure {
    Error::new("mount the view over", cause).on(as_path(path)).into()
}
