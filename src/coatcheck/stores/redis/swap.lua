-- swap.lua: write each record if its version is still the expected one.
-- KEYS[n] record   ARGV[3n-2] expected version, 8 bytes (empty: absent)
--                  ARGV[3n-1] new value (empty: delete)   ARGV[3n] when to delete it, in ms
-- returns an empty list if all were applied; else for each n the current value (empty: there is
-- none), or false if it was applied

local call, keys, args, answers, has_conflict = redis.call, KEYS, ARGV, {}, false
for n = 1, #keys do
  local key, expected, value, current = keys[n], args[3 * n - 2], args[3 * n - 1], false
  if expected == '' then
    current = call('GET', key)
  -- The version is bytes 1 to 8 of a value, so that nothing has to be decoded here.
  elseif call('GETRANGE', key, '1', '8') ~= expected then
    current = call('GET', key) or ''
  end
  answers[n] = current
  if current then
    has_conflict = true
  elseif value == '' then
    call('DEL', key)
  else
    call('SET', key, value, 'PXAT', args[3 * n])
  end
end
return has_conflict and answers or {}
