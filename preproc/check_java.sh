#!/usr/bin/env bash
# Checks that there is a Java that Spark can run on; if not, prints how to install one.
set -euo pipefail

need_java() {
  echo "error: $1; Spark needs Java 17 or newer, and ENGINE=local needs no Spark. Install Java with" >&2
  echo "    sudo apt-get install -y openjdk-17-jre-headless    # Debian, Ubuntu" >&2
  echo "    sudo dnf install -y java-21-openjdk-headless       # Fedora" >&2
  exit 1
}

java=java
if [[ -n ${JAVA_HOME:-} ]]; then java=$JAVA_HOME/bin/java; fi
command -v "$java" >/dev/null || need_java "there is no $java"
version=$("$java" -version 2>&1 | sed -n 's/.* version "\([^"]*\)".*/\1/p' | head -n 1)
major=${version#1.} # Java 8 calls itself 1.8
major=${major%%[.+-]*}
[[ $major =~ ^[0-9]+$ ]] || need_java "cannot read the version of $java"
((major >= 17)) || need_java "$java is Java $version"
