#compdef llamajax
# Completion of llamajax in zsh: eval "$(llamajax completion zsh)", after compinit
_llamajax() {
    local line word text
    local -a whole parts
    local files=
    for line in "${(@f)$("$words[1]" completion -- "${(@Q)words[2,CURRENT]}" 2> /dev/null)}"; do
        word=${line%%$'\t'*}
        text=${line#$word}
        text=${text#$'\t'}
        if [[ $word == ':files' ]]; then
            files=1
        elif [[ $word == *[.=] ]]; then
            parts+=("${word//:/\\:}:$text")
        elif [[ -n $word ]]; then
            whole+=("${word//:/\\:}:$text")
        fi
    done
    ((${#whole})) && _describe -t values llamajax whole
    ((${#parts})) && _describe -t values llamajax parts -S ''
    if [[ -n $files ]]; then
        [[ $PREFIX == -*=* ]] && compset -P '*='
        _files
    fi
}
if [[ ${funcstack[1]} == _llamajax ]]; then
    _llamajax "$@" # autoloaded from a folder of fpath
else
    compdef _llamajax llamajax
fi
