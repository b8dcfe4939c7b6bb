#!/bin/sh
# Installs Holdfast from this folder, without a network: the programs below --prefix, and as root the
# units of systemd, the agent's user and a token that root alone may read.  Starts nothing that was
# not running.  The same command upgrades and goes back; --uninstall takes it away again.
set -eu
here=$(dirname "$(readlink -f "$0")")
prefix=/opt/holdfast python= units=yes verb=install
usage() {
    echo "usage: $0 [--prefix DIR] [--python FILE] [--no-units] [--uninstall [--purge]]"
}
die() {
    echo "install.sh: $1" >&2
    exit "${2:-1}"
}
while [ $# -gt 0 ]; do
    case "$1" in
    --prefix | --python)
        [ $# -ge 2 ] || die "$1 needs a value" 2
        [ "$1" = --prefix ] && prefix=$2 || python=$2
        shift
        ;;
    --no-units) units=no ;;
    --uninstall) [ $verb = purge ] || verb=uninstall ;;
    --purge) verb=purge ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done
case "$prefix" in /*) ;; *) prefix=$PWD/$prefix ;; esac
[ "$(id -u)" = 0 ] || units=no
marker=.from-tarball
unit_files="holdfast.service holdfast-node.socket holdfast-node@.service holdfast-accept@.service"
command=/usr/local/bin/holdfast
live() { [ -d /run/systemd/system ]; }
# Never another's folder: only one that this script made.
ours() { [ -f "$1/$marker" ]; }
# Whether what stands in /etc belongs to the installation below --prefix.
runs_here() { grep -q "^ExecStart=$prefix/bin/" /etc/systemd/system/holdfast.service 2>/dev/null; }
of_another() {
    for folder in /etc /lib /usr/lib; do
        [ ! -e $folder/systemd/system/holdfast.service ] || return 0
    done
    return 1
}

if [ "$verb" != install ]; then
    # What was removed before may still be purged.
    ours "$prefix" || { [ $verb = purge ] && [ $units = yes ] && [ ! -e "$prefix" ]; } ||
        die "$prefix was not installed by this script: nothing is removed"
    if [ $units = yes ] && runs_here; then
        if live; then
            systemctl disable --now holdfast.service holdfast-node.socket || true
            # Not ended: launchers that it has started train on.  Of a template, all that it is for.
            systemctl disable holdfast-accept@.service || true
        fi
        for unit in $unit_files; do rm -f "/etc/systemd/system/$unit"; done
        rm -f /etc/sysusers.d/holdfast.conf /etc/tmpfiles.d/holdfast.conf
        if live; then systemctl daemon-reload; fi
    fi
    if [ $units = yes ] && [ "$(readlink $command)" = "$prefix/bin/holdfast" ]; then
        rm -f $command
    fi
    rm -rf "$prefix"
    if [ $verb = purge ] && [ $units = yes ]; then
        ! of_another || die "another installation is here: its configuration and state stay"
        rm -rf /etc/holdfast /var/lib/holdfast /var/lib/holdfast-node
        rm -rf /run/holdfast /run/holdfast-node.sock
        userdel holdfast 2>/dev/null || true
        groupdel holdfast 2>/dev/null || true
    fi
    echo "removed $prefix"
    exit 0
fi
case "$units $prefix" in
"yes "*[!A-Za-z0-9/._+-]*) die "units cannot name $prefix: choose a --prefix of letters, digits \
and ._+-, or --no-units" 2 ;;
esac

# The unit runs it as a user of its own: one below root's home, as pyenv makes them, will not do.
as_other() { "$@"; }
if [ $units = yes ] && command -v setpriv >/dev/null; then
    # By a shell: the first program that setpriv runs is still found with root's rights.
    as_other() {
        setpriv --reuid 65534 --regid 65534 --clear-groups -- sh -c 'exec "$@"' sh "$@"
    }
fi
serves() { # whether a Python is there and this tarball has packages for it
    version=$(cd / && as_other "$1" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
        2>/dev/null) || return 1
    [ -d "$here/tree/lib/python$version" ]
}
if [ -n "$python" ]; then
    case "$python" in */*) python=$(realpath -s "$python") ;; esac
    serves "$python" ||
        die "$python does not run (as root: for every user), or is none of: $(ls "$here/tree/lib")"
elif [ -x "$here/tree/python/bin/python3" ]; then
    python=taken
    as_other() { "$@"; } # it is copied to where all may read it
    serves "$here/tree/python/bin/python3" ||
        die "the interpreter that came along does not run on this machine: name one with --python"
else
    known="python3.13 python3.12 python3.11 python3"
    for name in $(printf '/usr/bin/%s ' $known) $known; do
        found=$(command -v "$name") || continue
        if serves "$found"; then python=$found; break; fi
    done
    [ -n "$python" ] || die "no Python of $(ls "$here/tree/lib" | tr '\n' ' ')here: install one, or \
name it with --python (Ubuntu 24.04 and Debian have one; Amazon Linux 2023: dnf install python3.11)"
fi
[ ! -e "$prefix" ] || ours "$prefix" || die "$prefix is there and not ours: choose another --prefix"

# Whole beside the old one, then two renames: whoever runs the old one keeps its open files.
new=$prefix.new-$$ old=$prefix.old-$$
trap 'rm -rf "$new"' EXIT
mkdir -p "$(dirname "$prefix")"
cp -R "$here/tree" "$new"
cp "$here/VERSION" "$new/$marker"
if [ "$python" = taken ]; then
    # Not relative: a venv's python names its home by an absolute path.
    ln -s ../python/bin/python3 "$new/bin/python"
    home=$prefix/python/bin
else
    python=$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
    ln -s "$python" "$new/bin/python"
    home=$(dirname "$python")
fi
printf 'home = %s\ninclude-system-site-packages = false\n' "$home" > "$new/pyvenv.cfg"
if [ -e "$prefix" ]; then mv "$prefix" "$old"; fi
mv "$new" "$prefix"
rm -rf "$old"
"$prefix/bin/python" -I -m compileall -q "$prefix/lib/python$version" || true
if command -v restorecon >/dev/null; then restorecon -R "$prefix" || true; fi

if [ $units = yes ]; then
    mkdir -p /etc/systemd/system /etc/sysusers.d /etc/tmpfiles.d /etc/holdfast /usr/local/bin
    for unit in $unit_files; do
        sed "s#/opt/holdfast/#$prefix/#g" "$here/systemd/$unit" > "/etc/systemd/system/$unit.new"
        mv "/etc/systemd/system/$unit.new" "/etc/systemd/system/$unit"
    done
    cp "$here/systemd/holdfast.sysusers" /etc/sysusers.d/holdfast.conf
    cp "$here/systemd/holdfast.tmpfiles" /etc/tmpfiles.d/holdfast.conf
    [ -e /etc/holdfast/agent.toml ] || cp "$here/agent.toml" /etc/holdfast/agent.toml
    if command -v systemd-sysusers >/dev/null; then systemd-sysusers holdfast.conf; fi
    if [ ! -e /etc/holdfast/tokens ]; then
        umask 077
        token=$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')
        printf '"%s" = "operator"\n' "$token" > /etc/holdfast/tokens.new
        mv /etc/holdfast/tokens.new /etc/holdfast/tokens
        umask 022
    fi
    if command -v systemd-tmpfiles >/dev/null; then systemd-tmpfiles --create holdfast.conf || true; fi
    # A command of that name that somebody else put there stays.
    target=$(readlink -f $command || true)
    if [ -e $command ] && ! ours "$(dirname "$(dirname "$target")")"; then
        echo "install.sh: $command is not ours and stays; the command is $prefix/bin/holdfast" >&2
    else
        ln -sfn "$prefix/bin/holdfast" $command
    fi
    if live; then
        systemctl daemon-reload
        systemctl try-restart holdfast.service || true
    fi
    echo "installed $("$prefix/bin/holdfast" --version) in $prefix; start it with:" \
        "systemctl enable --now holdfast"
else
    # Not the folder on the PATH: its own python would be found before yours.
    echo "installed $("$prefix/bin/holdfast" --version) in $prefix; its command is" \
        "$prefix/bin/holdfast, to be called so or linked to from a folder of your PATH"
fi
